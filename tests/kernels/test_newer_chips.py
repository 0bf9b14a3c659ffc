"""Plans for M3 and later: larger tiles, earlier loads, and native bfloat products. The emulator reports such
a GPU in a separate process."""

from __future__ import annotations

import math
import os
import random
import re
from typing import Any

import pytest
import torch

import torch_fattn
from tests.conftest import needs_emulator
from tests.golden.calls import plan_of
from tests.helpers import backward_problems, direct_launch
from tests.helpers.backward_problems import BackwardProblem
from tests.helpers.gradient_accuracy import assert_gradients_close
from tests.helpers.problems import Problem
from tests.helpers.processes import run_python
from tests.helpers.tensor_kernels import STATES
from tests.helpers.tensor_machines import M5
from tests.helpers.tensors import same_bits

# Says which GPU it is, and runs the tests that its arguments name.
PROCESS = """
import sys
import pytest
from torch_fattn.commands import doctor
print(doctor.this_gpu())
sys.exit(pytest.main(["-q", "-n", "0", "-p", "no:cacheprovider", *sys.argv[1:]]))
"""


# Random problems whose plans differ most: heads of a whole tile, of a ragged one, and wide ones.
PROBLEMS = "mps and (D64x64 or D80x40 or D192x128) and (prefill or bf16) and not (fp8 or int4)"
# The bounds of counts that M1 keeps, of tiles that are larger here.
BOUNDS = "long_prefills or (no_work_on_padding and causal and 64)"
FILES = "operators/test_random.py::test_problem", "kernels/test_counts.py", "operators/test_packed.py"


@needs_emulator
def test_problems_and_counts() -> None:
    arguments = [*(f"tests/{file}" for file in FILES), "-k", f"({PROBLEMS}) or {BOUNDS}"]
    done = run_python(["-c", PROCESS, *arguments], env={**os.environ, "SOFTMETAL_GPU_FAMILY": "9"})
    passed = re.search(r"(\d+) passed", done.stdout)
    assert "'family': 9" in done.stdout and passed, done.stdout + done.stderr
    assert done.returncode == 0 and int(passed[1]) >= 66, done.stdout


@needs_emulator
@pytest.mark.parametrize("state", STATES)
def test_prefills_on_tensor_operations(state: str) -> None:
    """Through the operators, on an M5 whose cooperative tensors have a new layout in every run."""
    seed = random.SystemRandom().randrange(2**30)
    compatible = 2 if state == "registers" else 0
    machine = M5 | {"FATTN_TENSOR": state, "SOFTMETAL_TENSOR_LAYOUT": f"random:{4 * seed + compatible}"}
    done = run_python(["-m", "tests.helpers.tensor_calls", str(seed), "6"], env={**os.environ, **machine})
    assert done.stdout == "6 calls launched fattn_prefill_tensor or fattn_prefill_latent_tensor\n", (
        f"seed {seed}\n{done.stdout}{done.stderr}"
    )


@pytest.mark.host_only
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize(("op", "rows"), [("prefill", 64), ("decode", 1)])
def test_native_bfloat_products(op: str, rows: int, dim: int) -> None:
    """M1 and M2 emulate its arithmetic; other dtypes, and bfloat queries over quantised caches, have nothing
    to gain."""

    def is_native(family: int, dtype: torch.dtype, op: str = op, **cache: Any) -> str:
        problem = Problem(0, op, dtype, 1, 4, 2, rows, 128, dim, dim, **cache)
        macro: str = plan_of(problem, family=family, cores=10)["passes"][0]["macros"]["FATTN_NATIVE_BFLOAT"]
        return macro

    for family in (7, 8, 9, 10):
        native = [is_native(family, dtype) for dtype in (torch.bfloat16, torch.float16)]
        assert native == [str(family > 8).lower(), "false"]
    assert is_native(9, torch.bfloat16, "decode", kv_format="int8") == "false"


@pytest.mark.host_only
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dim", range(8, 136, 8))
def test_gradients_of_fewer_threadgroups_than_cores(dim: int, causal: bool) -> None:
    """Both walks have smaller tiles, whose longer steps fit into threadgroup memory: under a causal mask if a
    core is idle, else if each half has its own. M1 and M2 have none."""

    def passes(**device: int) -> list[dict[str, Any]]:
        sizes = {"heads": 10, "kv_len": 512, "head_dim": dim, "is_causal": causal}
        return torch_fattn.explain("prefill_backward", **sizes, **device).passes

    for i, busy in enumerate(passes(family=9, cores=1)):
        groups = math.prod(busy["grid"])
        least = groups + 1 if causal else 2 * groups
        same, idle = (passes(family=9, cores=least - less)[i] for less in (1, 0))
        assert same["macros"] == busy["macros"] and idle["threadgroup_bytes"] <= 32768
        owns_one = i == 1 and 64 < dim <= 80  # fragment of keys
        assert math.prod(idle["grid"]) == groups * (1 if owns_one else 2)
    assert [p["macros"] for p in passes(family=8, cores=1)] == [
        p["macros"] for p in passes(family=8, cores=999)
    ]


@needs_emulator
@pytest.mark.parametrize("dim", [64, 96, 128])
def test_gradients_do_not_depend_on_idle_cores(dim: int) -> None:
    """Results must not depend on the batch: both tiles add up in the same order."""
    seed = random.SystemRandom().randrange(2**30)
    causality = "none" if dim == 64 else "bottom_right"
    forward = Problem(0, "prefill", torch.float16, 2, 4, 2, 40, 100, dim, dim, causality=causality)
    case = backward_problems.build(BackwardProblem(0, forward, grad_lse=True, out="remainder"), seed)
    arguments = backward_problems.as_launched(case.arguments("cpu")[0])
    tiles, found = [], []
    for family, cores in ((9, 4), (9, 64), (7, 4))[: 3 if dim == 128 else 2]:
        plan = torch_fattn.explain("prefill_backward", **arguments, family=family, cores=cores).data
        tiles.append({str(step["macros"]) for step in plan["passes"]})
        found.append(direct_launch.gradients(arguments, plan))
        assert_gradients_close(case, found[-1])
    assert not tiles[0] & tiles[1] and same_bits(found[0], found[1]), f"seed {seed}"
    assert dim < 128 or not same_bits(*found[1:]), "the control: whole rows of the query on M1"
