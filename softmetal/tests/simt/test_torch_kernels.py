"""torch's merge sort (SortMerge.h of the wheel), launched as torch does, is right and passes every check.

If any barrier is removed, the race detector reports it.
"""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from softmetal.testing import KernelError, Library

INCLUDE = Path(torch.__file__).parent / "include"
NAMES = {torch.float32: "float", torch.float16: "half", torch.int32: "int"}
THREADS = 128
BLOCK = 4 * THREADS  # elements that a threadgroup sorts
PROLOGUE = """#include <metal_stdlib>
using namespace metal;
#include <c10/metal/common.h>
#include <c10/metal/utils.h>
"""
TEXT = (INCLUDE / "ATen/native/mps/kernels/SortMerge.h").read_text()
CHECKS = "race,bounds,uninit"
BARRIER = re.compile(r"threadgroup_barrier\([^)]*\);")


def library(text: str = TEXT, kinds: str = "float|half|int", mode: str = "fast") -> Library:
    only = rf"^(sort_block|mb_sort_block|mb_merge_final)_({kinds})_tptg{THREADS}(_stable)?$"
    return Library(PROLOGUE + text, mode=mode, include=[INCLUDE], only=only)


def without_barrier(index: int) -> str:
    """Returns the header without its barrier number `index`; line numbers do not change."""
    barrier = list(BARRIER.finditer(TEXT))[index]
    return TEXT[: barrier.start()] + " " * len(barrier.group()) + TEXT[barrier.end() :]


class Problem:
    """Rows to sort, and outputs full of wrong values."""

    def __init__(self, rows: int, size: int, dtype: torch.dtype = torch.float32, descending: bool = False):
        generator = torch.Generator().manual_seed(size)
        # Each value several times: the order of equal elements shows whether the sort is stable.
        self.values = torch.randint(-size, size, (rows, size), generator=generator).to(dtype)
        self.sorted = torch.full_like(self.values, -1)
        self.indices = torch.full((rows, size), -1)
        self.descending = descending

    def is_sorted(self) -> bool:
        values, indices = self.values.sort(stable=True, descending=self.descending)
        return torch.equal(self.sorted, values) and torch.equal(self.indices, indices)

    def run(self, library: Library, **options: Any) -> None:
        """Sorts with one kernel if a row fits in a block; otherwise in blocks, with a merge of two blocks."""
        rows, size = self.values.shape
        suffix = f"{NAMES[self.values.dtype]}_tptg{THREADS}"
        parameters = struct.pack("<i", size), struct.pack("<2q", 1, size), bytes([self.descending])
        if size <= BLOCK:
            kernel = library.pipeline(f"sort_block_{suffix}_stable")
            buffers = [self.values, self.sorted, self.indices, *parameters]
            kernel.run(buffers, (1, rows, 1), (THREADS, 1, 1), **options)
            return
        blocks, block_indices = (
            torch.empty_like(self.values),
            torch.empty_like(self.values, dtype=torch.int32),
        )
        grid = ((size + BLOCK - 1) // BLOCK, rows, 1)
        assert grid[0] == 2
        kernel = library.pipeline(f"mb_sort_block_{suffix}_stable")
        kernel.run([self.values, blocks, block_indices, *parameters], grid, (THREADS, 1, 1), **options)
        merge = library.pipeline(f"mb_merge_final_{suffix}")
        buffers = [blocks, block_indices, self.sorted, self.indices, struct.pack("<4i", size, 2, 0, 0)]
        merge.run([*buffers, bytes([self.descending])], grid, (THREADS, 1, 1), **options)


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
