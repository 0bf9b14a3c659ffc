"""Plans for M3 and later: larger tiles, earlier loads, and native bfloat products. The emulator reports such
a GPU in a separate process."""

from __future__ import annotations

import os
import random
import re
from typing import Any

import pytest
import torch

from tests.conftest import needs_emulator
from tests.golden.calls import plan_of
from tests.helpers.problems import Problem
from tests.helpers.processes import run_python
from tests.helpers.tensor_kernels import STATES
from tests.helpers.tensor_machines import M5

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
