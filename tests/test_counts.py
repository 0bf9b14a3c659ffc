"""What the kernels move and multiply, counted exactly: the bounds of tests/counts_bounds.json, and the ratios
to the least possible."""

from __future__ import annotations

import functools
import json
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from bench import bounds, counting
from bench.calls import Call

from .conftest import needs_emulator

pytestmark = needs_emulator

BOUNDS = bounds.load()


@functools.cache
def counts_of(name: str) -> counting.Counts:
    return counting.count_ours(bounds.CASES[name])


def test_every_case_has_bounds() -> None:
    assert BOUNDS.keys() == bounds.CASES.keys()


@pytest.mark.parametrize("name", bounds.CASES)
def test_within_bounds(name: str) -> None:
    counted = bounds.summary(counts_of(name))
    assert not bounds.exceeded(BOUNDS[name], counted)
    lower = [what for what, count in counted.items() if count < BOUNDS[name][what]]
    if lower:
        warnings.warn(
            f"{name}: {', '.join(lower)} went down; run `python -m bench.bounds --update`", stacklevel=1
        )


def test_a_count_above_its_bound_is_noticed() -> None:
    counted = bounds.summary(counts_of("decode-group4"))
    assert bounds.exceeded({**counted, "products": counted["products"] - 1}, counted) == [
        f"products rose from {counted['products'] - 1:,} to {counted['products']:,}"
    ]


def test_update_raises_a_bound_only_when_told_to(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    name = "decode-rows4"
    counted = bounds.summary(counts_of(name))
    monkeypatch.setattr(bounds, "FILE", tmp_path / "bounds.json")
    monkeypatch.setattr(bounds, "CASES", {name: bounds.CASES[name]})
    too_low = {name: {**counted, "exps": 1}}
    bounds.FILE.write_text(json.dumps(too_low))
    assert bounds.main(["--update"]) == 1
    assert bounds.load() == too_low
    assert bounds.main(["--update", "--allow-raise"]) == 0
    assert bounds.load() == {name: counted}
    bounds.FILE.write_text(json.dumps({name: {**counted, "exps": counted["exps"] + 1}}))
    assert bounds.main(["--update"]) == 0
    assert bounds.load() == {name: counted}


@pytest.mark.parametrize("op", ["decode", "paged-decode"])
@pytest.mark.parametrize("group", bounds.GROUP_SIZES)
def test_decode_reads_the_cache_once(op: str, group: int) -> None:
    """A threadgroup has all rows of its keys, eight to a simdgroup, each of which loads every key once."""
    counts = counts_of(f"{op}-group{group}")
    assert 1.0 <= counts.cache_ratio / max(1, group // 8) <= 1.05
    assert counts.products_ratio <= 1.05
    packed_rows = counts.call.group_size * counts.call.q_len
    blocks = counts.call.kv_heads * -(-packed_rows // 32)
    rows_abreast = min(4, max(1, packed_rows // 8))
    # Three threadgroups for each of eight cores, if there are so many chunks.
    shares = min(8 * 3 // blocks, 2048 // (128 * rows_abreast))
    assert counts.dispatches[0].grid == (shares, blocks, 1)


@pytest.mark.parametrize("op", ["decode", "paged_decode"])
def test_a_window_is_all_that_is_loaded(op: str) -> None:
    """256 of 4,096 keys, from the middle of a step on."""
    call = Call(op, 8, 2, 64, 1, 4091, window_left=255, block_size=16 if op == "paged_decode" else 0)
    counts = counting.count_ours(call)
    row = 64 * 2 * call.kv_heads
    assert counts.traffic("key") == counts.traffic("value") == 256 * row
    assert counts.products_ratio <= 1.3  # whole steps of 16 keys
    whole = counting.count_ours(replace(call, window_left=-1))
    assert whole.traffic("key") == 4091 * row


def test_reading_the_cache_for_every_head_is_noticed() -> None:
    """torch 2.13's kernel, which shares nothing between the four heads of a group."""
    torch_metal = pytest.importorskip("bench.peers.torch_metal")
    counts, error, _ = counting.count_peer(torch_metal, Call("decode", 8, 2, 64, 1, 512))
    assert error < 1e-3
    assert counts.cache_ratio == 4.0


def test_bytes_are_those_counted_by_hand() -> None:
    """Two key-value heads, 2,048 keys in 11 chunks of 192: one simdgroup of each threadgroup loads the query
    rows, once."""
    counts = counts_of("decode-group4")
    head, row = 2048 * 128 * 2, 128 * 2
    decode, merge = counts.dispatches
    assert decode.read["key"] == decode.read["value"] == 2 * head
    assert decode.read["query"] == 11 * row * 8
    assert decode.written["partial"] == 8 * 11 * (128 + 1) * 4
    assert merge.written["out"] == 8 * row


def test_causal_prefill_multiplies_little_more_than_it_must() -> None:
    call = Call("prefill", 1, 1, 64, 1024, 1024, causal=True)
    assert 1.0 <= counting.count_ours(call, count_bytes=False).products_ratio < 1.01


def test_least_products_by_enumeration() -> None:
    """Blocks of 8 rows x 8 keys that hold a visible pair, one by one."""
    for q_len, kv_len, causal, window in ((20, 50, True, -1), (9, 9, True, 3), (16, 24, False, -1)):
        call = Call("prefill", 1, 1, 16, q_len, kv_len, causal=causal, window_left=window)
        blocks = set()
        for row in range(q_len):
            position = kv_len - q_len + row
            for key in range(kv_len):
                hidden = (causal and key > position) or (window >= 0 and key < position - window)
                if not hidden:
                    blocks.add((row // 8, key // 8))
        assert call.least_products == len(blocks) * 4
