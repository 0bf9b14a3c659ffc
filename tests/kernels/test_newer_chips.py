"""Plans for M3 and later: larger tiles, earlier loads, and native bfloat products. The emulator reports such
a GPU in a separate process."""

from __future__ import annotations

import os
import random
import re
from typing import Any

import pytest
import torch

import torch_fattn
from tests.conftest import needs_emulator
from tests.helpers.processes import run_python
from tests.helpers.tensor_kernels import STATES
from tests.helpers.tensor_machines import M5

NATIVE = "FATTN_NATIVE_BFLOAT"
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


def macros(family: int, op: str, dtype: torch.dtype, dim: int, stored: torch.dtype | None = None) -> Any:
    """The plan of a call of `op` on such a GPU; `stored` is the format of its cache."""
    query = torch.empty(1, 4, 1 if "decode" in op else 64, dim, dtype=dtype, device="meta")
    if stored is None:
        plan = torch_fattn.explain(op, query, query[:, :2], query[:, :2], family=family, cores=10)
    else:
        pool = torch.empty(8, 16, 2, dim, dtype=stored, device="meta")
        scales = torch.empty(8, 16, 2, dtype=torch.float32, device="meta")
        tables = torch.empty(1, 8, dtype=torch.int32, device="meta")
        lens = torch.empty(1, dtype=torch.int32, device="meta")
        both = {"key_scales": scales, "value_scales": scales}
        plan = torch_fattn.explain(op, query, pool, pool, tables, lens, **both, family=family, cores=10)
    return plan.passes[0]["macros"]


@pytest.mark.host_only
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("op", ["prefill", "decode"])
def test_native_bfloat_products(op: str, dim: int) -> None:
    """M1 and M2 emulate its arithmetic; other dtypes, and bfloat queries over quantised caches, have nothing
    to gain."""
    for family in (7, 8, 9, 10):
        native = {dtype: macros(family, op, dtype, dim)[NATIVE] for dtype in (torch.bfloat16, torch.float16)}
        assert native == {torch.bfloat16: str(family > 8).lower(), torch.float16: "false"}
    over_int8 = macros(9, "paged_decode", torch.bfloat16, dim, torch.int8)
    assert over_int8[NATIVE] == "false"
