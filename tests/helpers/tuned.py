"""Helpers for tests of tuned sizes: installs rows for this GPU and restores the built-in table afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import torch_fattn
from bench.backends import counting
from tests.conftest import why_no_gpu
from tests.helpers.problems import Problem
from torch_fattn.tuning import tuned_file
from torch_fattn.tuning.tuned_file import TENSORS, Gpu, TunedFile, TunedRoute, TunedRow

PROVENANCE = "tuned by a test"
BUILT_IN = {
    "prefill": {"row_fragments": 1, "tile_keys": 16, "simdgroups": 4, "early_loads": 0},
    "prefill_wide": {"row_fragments": 1, "row_groups": 1, "tile_keys": 32, "simdgroups": 8, "early_loads": 0},
    "decode": {"tile_keys": 16, "simdgroups": 4, "min_chunk": 128, "threadgroups_per_core": 3},
    "decode_wide": {"tile_keys": 16, "simdgroups": 8, "min_chunk": 128, "threadgroups_per_core": 2},
    "decode_vector": {"tile_keys": 32, "simdgroups": 4, "min_chunk": 256, "threadgroups_per_core": 4},
}


def row(kernel: str, dtype: str = "float16", max_length: int | None = None, **sizes: int) -> TunedRow:
    dims = (129, 576) if kernel.endswith("_wide") else (1, 256) if kernel == "decode_vector" else (1, 128)
    return TunedRow(kernel, dtype, *dims, BUILT_IN[kernel] | sizes, max_length)


def tensor_row(macos: str = "26.2") -> TunedRow:
    """Turns on tensor operations for heads of 64, on a GPU before M5."""
    return TunedRow(TENSORS, "float16", 64, 64, {}, macos=macos)


def this_chip() -> Gpu:
    return Gpu.this()


def file_of(rows: list[TunedRow], routes: list[TunedRoute] | None = None) -> TunedFile:
    chip, digest = this_chip(), tuned_file.source_digest()
    return TunedFile(torch_fattn.__version__, digest, chip, "2026-01-31", rows, routes or [])


Install = Callable[..., None]


@pytest.fixture
def install() -> Iterator[Install]:
    """Installs rows for this GPU until the test ends."""

    def use(*rows: TunedRow) -> None:
        tuned_file.set_tuning(this_chip(), list(rows), PROVENANCE)

    yield use
    if why_no_gpu() is None:
        use()


@contextlib.contextmanager
def tiles_of_large_calls(problem: Problem) -> Iterator[None]:
    """Prefills that do not fill the GPU get smaller tiles; in here that one has those of a call that does."""
    if problem.is_decode or problem.kv_format != "float":
        yield
        return
    query = torch.empty(1, 64, 4096, problem.head_dim, dtype=problem.dtype, device="meta")
    with counting.tile_of_prefill(query, query, query.new_empty(1, 64, 4096, problem.value_dim)):
        yield


def plan_of(
    op: str, q_len: int, kv_len: int, dim: int, dtype: torch.dtype = torch.float16, **options: Any
) -> Any:
    """The plan of a call on this GPU."""
    one = torch.empty(1, 1, 1, dim, dtype=dtype, device="mps")
    query, key = one.expand(1, 6, q_len, -1), one.expand(1, 2, kv_len, -1)
    return torch_fattn.explain(op, query, key, torch.empty_like(one).expand(1, 2, kv_len, -1), **options)
