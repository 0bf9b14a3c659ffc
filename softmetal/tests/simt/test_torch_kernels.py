"""Kernels that nobody here wrote run unmodified, are right, and are quiet under every check.

Without any one of the barriers they need, the race detector is not.
"""

from __future__ import annotations

import pytest
import torch
from torch_kernels import BARRIER, Problem, header, library, without_barrier

from softmetal.simt import KernelError, Library

CHECKS = "race,bounds,uninit"
PREFILL, DECODE = header("PrefillAttention"), header("DecodeAttention")
PREFILL_ONLY = r"prefill_attention_b?float(32|16)_bq32_bk\d+_(bd128_.*_hm0_dc0|bd64_.*_hm0_dc1)_maskb?float"
DECODE_ONLY = (
    r"(_(float|half)_64_64_masknone(_causal)?|_float_128_128_masknone|2pass_2_(float|half)_(64|128))$"
)
DECODE_FLOAT_64 = r"(vector_float_64_64_masknone|2pass_1_float_64_64_masknone|2pass_2_float_64)$"
TOLERANCE = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@pytest.fixture(scope="module")
def prefill() -> Library:
    return library(PREFILL, PREFILL_ONLY)


@pytest.fixture(scope="module")
def decode() -> Library:
    return library(DECODE, DECODE_ONLY)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "shape",
    [
        (1, 2, 2, 64, 64, 128, False),
        (1, 2, 2, 96, 96, 64, True),
        (1, 4, 2, 77, 93, 128, False),
        (2, 2, 1, 33, 70, 64, True),
    ],
    ids=str,
)
def test_prefill(prefill: Library, shape: tuple, dtype: torch.dtype) -> None:
    problem = Problem(*shape, dtype=dtype)
    problem.run_prefill(prefill)
    assert problem.error() < TOLERANCE[dtype]


@pytest.mark.parametrize("two_passes", [False, True])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((1, 8, 8, 1, 512, 128, False), torch.float32),
        ((2, 4, 1, 1, 37, 64, False), torch.float32),
        ((1, 4, 2, 4, 50, 64, True), torch.float32),
        ((1, 4, 2, 1, 300, 64, False), torch.float16),
    ],
    ids=str,
)
def test_decode(decode: Library, shape: tuple, dtype: torch.dtype, two_passes: bool) -> None:
    problem = Problem(*shape, dtype=dtype)
    run = problem.run_decode_in_two_passes if two_passes else problem.run_decode
    run(decode)
    assert problem.error() < TOLERANCE[dtype]


@pytest.fixture(scope="module")
def checked_prefill() -> Library:
    return library(PREFILL, "float32_bq32_bk32_bd64_wm4_wn1_hm0_dc1_maskfloat32", mode="checked")


@pytest.fixture(scope="module")
def checked_decode() -> Library:
    return library(DECODE, DECODE_FLOAT_64, mode="checked")


@pytest.mark.parametrize("order", ["forward", "reverse", "random:1"])
def test_quiet_under_all_checks(checked_prefill: Library, checked_decode: Library, order: str) -> None:
    problem = Problem(1, 2, 1, 40, 45, 64, causal=True)
    problem.run_prefill(checked_prefill, checks=CHECKS, order=order)
    assert problem.error() < TOLERANCE[torch.float32]
    problem = Problem(1, 2, 1, 1, 40, 64)
    problem.run_decode(checked_decode, checks=CHECKS, order=order)
    assert problem.error() < TOLERANCE[torch.float32]
    problem.run_decode_in_two_passes(checked_decode, checks=CHECKS, order=order)
    assert problem.error() < TOLERANCE[torch.float32]


# The first barrier comes before any access to threadgroup memory, the last one after all of them.
REDUNDANT_IN_PREFILL = (0, 5)


def test_the_number_of_barriers() -> None:
    assert (len(BARRIER.findall(PREFILL)), len(BARRIER.findall(DECODE))) == (6, 8)


@pytest.mark.parametrize("index", range(6))
def test_prefill_without_a_barrier(index: int) -> None:
    only = "prefill_attention_float32_bq32_bk32_bd64_wm4_wn1_hm0_dc0_maskfloat32"
    mutant = library(without_barrier(PREFILL, index), only, mode="checked")
    problem = Problem(1, 1, 1, 32, 96, 64)
    if index in REDUNDANT_IN_PREFILL:
        problem.run_prefill(mutant, checks=CHECKS)
        assert problem.error() < TOLERANCE[torch.float32]
        return
    with pytest.raises(
        KernelError, match="race: .* threadgroup array '.*' at kernel.metal:.* races with the "
    ):
        problem.run_prefill(mutant, checks="race")


@pytest.mark.parametrize("index", range(8))
def test_decode_without_a_barrier(index: int) -> None:
    mutant = library(without_barrier(DECODE, index), DECODE_FLOAT_64, mode="checked")
    problem = Problem(1, 1, 1, 1, 100, 64)
    run = problem.run_decode if index < 3 else problem.run_decode_in_two_passes
    with pytest.raises(
        KernelError, match="race: .* threadgroup array '.*' at kernel.metal:.* races with the "
    ):
        run(mutant, checks="race")
