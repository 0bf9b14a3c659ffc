"""Exact counts of attention on tensor operations: products beside the least possible, bytes, and barriers.
Bounds: counts_bounds.json, with those of the other kernels."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from bench.backends import counting, samples
from bench.cases.calls import Call
from bench.models import bounds
from bench.peers.launch import OURS_ON_TENSORS
from tests.conftest import needs_emulator

pytestmark = needs_emulator

STATES = tuple(OURS_ON_TENSORS)
# 64 rows and 32 keys of a step; with 128 columns in threadgroup memory, 32 rows (csrc/plan/tuning.h).
ROWS = {("registers", 64): 64, ("registers", 128): 64, ("threadgroup", 64): 64, ("threadgroup", 128): 32}
KEYS = 32


@functools.cache
def counts_of(name: str) -> counting.Counts:
    return bounds.count(name)


@pytest.mark.parametrize("name", bounds.TENSOR_CASES)
def test_every_product_is_one_of_tensor_operations(name: str) -> None:
    counts = counts_of(name)
    first, *merges = [dispatch.kernel for dispatch in counts.dispatches]
    assert first == ("fattn_prefill_latent_tensor" if counts.call.latent_dim else "fattn_prefill_tensor")
    assert counts.total("tensor_products") == counts.total("products") > 0
    assert (counts.partial_ratio == 0) == (not merges)


def test_other_kernels_have_none() -> None:
    """The control."""
    counts = counting.count_ours(Call("prefill", 1, 1, 64, 32, 32))
    assert counts.total("tensor_products") == 0 < counts.total("products")


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_without_a_mask_nothing_is_done_twice(state: str, head_dim: int) -> None:
    """No product beside the needed ones. A simdgroup reads each key and value once for its 16 rows, and a
    threadgroup shares them; the query is read once."""
    counts = counts_of(f"tensor-{state}-full-D{head_dim}")
    assert counts.products_ratio == 1.0
    threadgroups = counts.call.q_heads * counts.call.q_len // ROWS[state, head_dim]
    head = counts.call.kv_len * head_dim * 2
    assert counts.distinct_bytes == threadgroups * 2 * head
    assert (
        counts.traffic("key")
        == counts.traffic("value")
        == counts.call.q_heads * counts.call.q_len // 16 * head
    )
    assert counts.traffic("query") == counts.traffic("out") == counts.call.q_heads * head


@pytest.mark.parametrize("state", STATES)
def test_a_decode_reads_the_keys_of_its_rows_once(state: str) -> None:
    """A tile has the 32 rows that share a key-value head, and each of its two simdgroups reads their keys.
    The parts of the keys are merged."""
    counts = counts_of(f"tensor-{state}-decode")
    assert (counts.distinct_ratio, counts.cache_ratio, counts.products_ratio) == (1.0, 2.0, 1.0)
    assert [dispatch.kernel for dispatch in counts.dispatches[1:]] == ["fattn_merge"]


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("tensor-decode-MLA", 2 * 256),
        ("tensor-paged-decode-MLA", 2 * 256),
        ("tensor-prefill-MLA", 2 * (48 + 64)),  # of two heads; the first tile does not see the last 16 keys
    ],
)
def test_latent_heads_are_read_once_for_16_rows(name: str, keys: int) -> None:
    """A tile has 16 rows of a decode, or of one head. Values are columns of the keys: lanes load them again,
    but a threadgroup has read these bytes."""
    counts = counts_of(name)
    assert counts.traffic("key") == counts.distinct_bytes == keys * 576 * 2
    assert counts.traffic("value") == keys * 512 * 2
    assert counts.total("products") == keys // 8 * (16 // 8) * (576 + 512) // 8


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_causal_steps_have_a_visible_key(state: str, head_dim: int) -> None:
    """A simdgroup of 16 rows takes the steps of 32 keys that one of them sees."""
    call, _ = bounds.TENSOR_CASES[f"tensor-{state}-causal-D{head_dim}"]
    steps = sum(-(-(first + 16) // KEYS) for first in range(0, call.q_len, 16))
    of_step = 2 * (16 // 8) * (KEYS // 8) * (head_dim // 8)
    counts = counts_of(f"tensor-{state}-causal-D{head_dim}")
    assert counts.total("products") == call.q_heads * steps * of_step
    assert call.least_products < counts.total("products")


@pytest.mark.parametrize(("head_dim", "most"), [(64, 1.02), (128, 1.02)])
def test_long_causal_prefills(head_dim: int, most: float) -> None:
    """Few products are of hidden pairs."""
    call = Call("prefill", 1, 1, head_dim, 4096, 4096, causal=True)
    counts = samples.count_prefill_on_tensors(call)
    assert 1.0 <= counts.products_ratio <= most
    hidden = replace(call, causal=False).least_products / call.least_products
    assert hidden * counts.products_ratio > most, "the control: to visit all keys would be too many"


def test_scores_in_registers_leave_threadgroup_memory_alone() -> None:
    """The query is read there by both; scores, weights and factors pass through it only without registers:
    four bytes of 16 x 32, written, read twice, written and read as an operand."""
    registers, threadgroup = (counts_of(f"tensor-{state}-full-D64") for state in STATES)
    scores = threadgroup.call.q_heads * threadgroup.call.q_len * threadgroup.call.kv_len * 4
    assert threadgroup.threadgroup_bytes - registers.threadgroup_bytes >= 5 * scores
    assert threadgroup.total("simdgroup_barriers") > 0 == registers.total("simdgroup_barriers")
