"""Every head size of the kernels through the device's compiler: Apple's on a Mac, softmetal's on Linux.

Every test is one tiny call, so each also shows that the pipeline can be made and run. On Linux the compiler's
front end just reads the head sizes that test_random.py runs, and a third of the others run, by the day
(`--third`). test_offline_compiler.py is about Apple's other compiler, which needs no GPU. Random problems
have every option and number of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import torch_fattn
from tests.conftest import EMULATED
from tests.helpers import problems
from tests.helpers.accuracy import assert_close
from tests.helpers.direct_launch import kernel_text
from tests.helpers.problems import HEAD_DIMS, WIDE_HEAD_DIMS, Problem

ALL_DIMS = range(8, 129, 8)
WIDE_DIMS = range(136, 577, 8)
DRAWN = {*((*dims, False) for dims in HEAD_DIMS), *WIDE_HEAD_DIMS}


def case_of(op: str, dtype: torch.dtype, **fields: Any) -> problems.Case:
    sizes: dict[str, Any] = {"q_heads": 2, "kv_heads": 1, "q_len": 9, "kv_len": 18}
    if op == "decode":
        sizes |= {"q_len": 2, "kv_len": 32, "seq_lens": (21,)}
    return problems.build(Problem(0, op, dtype, 1, **sizes, **fields))


def run(op: str, dtype: torch.dtype, **fields: Any) -> None:
    case = case_of(op, dtype, **fields)
    out, lse = getattr(torch.ops.fattn, op)(**case.arguments("mps")[0])
    assert_close(case, out.cpu(), lse.cpu())


def read(op: str, dtype: torch.dtype, **fields: Any) -> None:
    """By the compiler's front end, with the rules of Apple's: no code is generated."""
    from softmetal.testing import compile_errors

    for launch in torch_fattn.explain(op, **case_of(op, dtype, **fields).arguments("mps")[0]).passes:
        macros = [f"{name}={value}" for name, value in launch["macros"].items()]
        assert compile_errors(kernel_text(launch["source"]), macros) == "", macros


@pytest.fixture
def check(pytestconfig: pytest.Config) -> Callable[..., None]:
    """Runs a head size, reads its kernels, or leaves it to another day."""

    def run_or_read(op: str, dtype: torch.dtype, *dims: int, value_in_key: bool = False) -> None:
        third, number = pytestconfig.getoption("--third"), sum(dims) // 8 + problems.DTYPES.index(dtype)
        is_drawn = (*dims, value_in_key) in DRAWN
        if EMULATED and not is_drawn and third not in ("all", str(number % 3)):
            pytest.skip(f"it runs with --third {number % 3}")
        use = read if EMULATED and is_drawn and third != "all" else run
        use(op, dtype, head_dim=dims[0], value_dim=dims[1], value_in_key=value_in_key)

    return run_or_read


@pytest.mark.rotating
@pytest.mark.parametrize("op", ["prefill", "decode"])
@pytest.mark.parametrize("dtype", problems.DTYPES, ids=problems.SHORT.get)
@pytest.mark.parametrize("dim", ALL_DIMS)
def test_head_dim(op: str, dtype: torch.dtype, dim: int, check: Callable[..., None]) -> None:
    check(op, dtype, dim, dim)


@pytest.mark.rotating
@pytest.mark.parametrize("dim", WIDE_DIMS)
@pytest.mark.parametrize(("op", "value_in_key"), [("decode", False), ("decode", True), ("prefill", False)])
def test_wide_head_dim(op: str, value_in_key: bool, dim: int, check: Callable[..., None]) -> None:
    check(op, problems.DTYPES[dim // 8 // 9 % 3], dim, dim - 8 * value_in_key, value_in_key=value_in_key)


@pytest.mark.rotating
@pytest.mark.parametrize("value_dim", ALL_DIMS)
@pytest.mark.parametrize("head_dim", [8, 64, 72, 128])
@pytest.mark.parametrize("op", ["prefill", "decode"])
def test_value_dim(op: str, head_dim: int, value_dim: int, check: Callable[..., None]) -> None:
    check(op, torch.float16, head_dim, value_dim)
