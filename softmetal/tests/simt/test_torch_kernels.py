"""torch's kernels run unmodified, give correct results, and pass every check.

If any barrier is removed, the race detector reports it.
"""

from __future__ import annotations

import pytest
import torch
from torch_kernels import BARRIER, BLOCK, TEXT, Problem, library, without_barrier

from softmetal.testing import KernelError, Library

CHECKS = "race,bounds,uninit"


@pytest.fixture(scope="module")
def sort() -> Library:
    return library()


@pytest.fixture(scope="module")
def checked_sort() -> Library:
    return library(kinds="float", mode="checked")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int32], ids=str)
@pytest.mark.parametrize(("rows", "size"), [(1, BLOCK), (3, 77), (2, BLOCK + 1), (3, 2 * BLOCK)])
def test_sort(sort: Library, rows: int, size: int, dtype: torch.dtype) -> None:
    for descending in (False, True):
        problem = Problem(rows, size, dtype, descending)
        assert not problem.is_sorted()
        problem.run(sort)
        assert problem.is_sorted()


@pytest.mark.parametrize("order", ["forward", "reverse", "random:1"])
def test_quiet_under_all_checks(checked_sort: Library, order: str) -> None:
    for size in (300, BLOCK + 100):
        problem = Problem(2, size)
        problem.run(checked_sort, checks=CHECKS, order=order)
        assert problem.is_sorted()


def test_the_number_of_barriers() -> None:
    assert len(BARRIER.findall(TEXT)) == 11


@pytest.mark.parametrize("index", range(11))
def test_without_a_barrier(index: int) -> None:
    """The first six barriers are in `sort_block`."""
    mutant = library(without_barrier(index), kinds="float", mode="checked")
    problem = Problem(1, BLOCK if index < 6 else 2 * BLOCK)
    with pytest.raises(KernelError, match="race: .* threadgroup array '.*' at kernel.metal:.* races with "):
        problem.run(mutant, checks="race")
