"""Exact counts of the bytes and products of the kernels: the bounds of counts_bounds.json, and the
ratios to the least possible."""

from __future__ import annotations

import functools
import warnings
from dataclasses import replace

import pytest

import torch_fattn
from bench.backends import counting, samples
from bench.cases import masks
from bench.cases.calls import Call
from bench.models import bounds
from tests.conftest import needs_emulator

pytestmark = needs_emulator

BOUNDS = bounds.load(bounds.FILE)


@functools.cache
def counts_of(name: str) -> counting.Counts:
    return bounds.count(name)


@pytest.mark.parametrize("name", bounds.NAMES)
def test_within_bounds(name: str) -> None:
    counted = bounds.summary(counts_of(name))
    assert not bounds.exceeded(BOUNDS[name], counted)
    lower = [what for what, count in counted.items() if count < BOUNDS[name][what]]
    if lower:
        warnings.warn(
            f"{name}: {', '.join(lower)} went down; run `python -m bench bounds --update`", stacklevel=1
        )


@pytest.mark.parametrize("op", ["decode", "paged-decode"])
@pytest.mark.parametrize("group", bounds.GROUP_SIZES)
def test_decode_reads_the_cache_once(op: str, group: int) -> None:
    """A threadgroup has all rows of its keys, one or two, or eight, to a simdgroup, which loads every key
    once."""
    counts = counts_of(f"{op}-group{group}")
    assert 1.0 <= counts.cache_ratio / max(1, group // 8) <= 1.05
    assert counts.products_ratio <= 1.05
    packed_rows = counts.call.group_size * counts.call.q_len
    blocks = counts.call.kv_heads * -(-packed_rows // 32)
    rows_abreast = min(4, max(1, packed_rows // 8))
    # Three threadgroups for each of eight cores, or four of lanes, if there are so many chunks.
    on_core, chunk = (4, 128 // packed_rows) if packed_rows <= 2 else (3, 64 * rows_abreast)
    shares = min(8 * on_core // blocks, 2048 // chunk)
    assert counts.dispatches[0].grid == (shares, blocks, 1)


@pytest.mark.parametrize(
    "call",
    [
        Call("decode", 32, 2, 64, 1, 700),  # 16 packed rows per key-value head
        Call("decode", 16, 2, 64, 4, 515),  # 32
        Call("decode", 4, 2, 128, 8, 515, dtype="bfloat16"),
        Call("decode", 16, 2, 64, 2, 700, window_left=99),
        Call("decode", 9, 1, 192, 2, 130, dtype="float32"),
        Call("decode", 32, 1, 256, 1, 300, window_left=63),
        Call("decode", 8, 1, 576, 4, 130, latent_dim=512),
        Call("decode", 16, 1, 64, 2, 130, latent_dim=40),
        Call("decode", 16, 1, 256, 1, 130, kv_format="int8"),
        Call("decode", 8, 1, 576, 1, 130, latent_dim=512, kv_format="fp8_e4m3"),
        Call("decode", 8, 1, 576, 2, 130, latent_dim=512, kv_format="int4"),
    ],
    ids=str,
)
@pytest.mark.parametrize("block_size", [0, 16], ids=["dense", "paged"])
def test_a_threadgroup_reads_the_keys_of_all_rows_once(call: Call, block_size: int) -> None:
    """Up to 32 packed rows. Simdgroups with different rows may load a byte again; simdgroups that divide the
    columns do not."""
    op = "paged_decode" if block_size else "decode"
    counts = counting.count_ours(replace(call, op=op, block_size=block_size))
    assert 1.0 <= counts.distinct_ratio <= 1.03
    if counts.dispatches[0].kernel == "fattn_decode_wide":
        assert counts.cache_ratio == counts.distinct_ratio
    else:
        row_groups = counts.call.group_size * counts.call.q_len // 8
        assert counts.cache_ratio == pytest.approx(row_groups * counts.distinct_ratio)


def test_more_rows_than_32_are_read_again() -> None:
    """The control: by a second threadgroup, which has the other rows."""
    assert counting.count_ours(Call("decode", 64, 1, 256, 1, 64)).distinct_ratio == 2.0


@pytest.mark.parametrize("rows", [8, 32])
@pytest.mark.parametrize("op", ["decode", "paged-decode"])
def test_values_that_are_columns_of_the_keys_are_read_once(op: str, rows: int) -> None:
    counts = counts_of(f"{op}-MLA-rows{rows}")
    assert counts.distinct_ratio == counts.cache_ratio == 1.0
    assert counts.traffic("value") == 0
    assert counts_of(f"{op}-D256-rows{rows}").cache_ratio == 1.0


def test_a_copy_of_the_columns_is_another_value() -> None:
    """The control: equal numbers in separate memory are read separately."""
    import softmetal
    import torch_fattn

    operands = Call("decode", 8, 1, 192, 1, 64, latent_dim=128).operands("mps")
    read = []
    for value in (operands["value"], operands["value"].clone()):
        with softmetal.checks(count_bytes=True), softmetal.record() as launches:
            torch_fattn.decode(operands["query"], operands["key"], value)
        slots = launches[-1]["buffers_read"]
        read.append((slots["1"], slots.get("2", 0)))
    key_bytes = 64 * 192 * 2
    assert read == [(key_bytes, 0), (key_bytes, 64 * 128 * 2)]


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
    from bench.peers import torch_metal

    counts, error, _ = counting.count_peer(torch_metal, Call("decode", 8, 2, 64, 1, 512))
    assert error < 1e-3
    assert counts.cache_ratio == 4.0


def test_bytes_match_a_count_by_hand() -> None:
    """Two key-value heads, 2,048 keys in 11 chunks of 192: one simdgroup of each threadgroup loads the query
    rows, once."""
    counts = counts_of("decode-group4")
    head, row = 2048 * 128 * 2, 128 * 2
    decode, merge = counts.dispatches
    assert decode.read["key"] == decode.read["value"] == 2 * head
    assert decode.read["query"] == 11 * row * 8
    assert decode.written["partial"] == 8 * 11 * (128 + 4) * 4
    assert merge.written["out"] == 8 * row


def tile_of(call: Call) -> tuple[int, int]:
    """Rows and keys of a tile of this prefill, among many heads."""
    with counting.tile_of_many_heads(call):
        operands = call.operands("mps").values()
        macros = torch_fattn.explain("prefill", *operands, is_causal=call.causal).passes[0]["macros"]
    fragments = int(macros["FATTN_ROW_FRAGMENTS"]) * int(macros["FATTN_SIMDGROUPS"])
    return 8 * fragments, int(macros["FATTN_TILE_KEYS"])


LONG = [
    (Call("prefill", 1, 1, 64, 4096, 4096, causal=True), 1.05),
    (Call("prefill", 1, 1, 128, 4096, 4096, causal=True), 1.05),
    (Call("prefill", 1, 1, 64, 8192, 8192, causal=True, window_left=511), 1.15),
    (Call("prefill", 1, 1, 128, 8192, 8192, causal=True, window_left=511), 1.15),
]


@pytest.mark.parametrize(("call", "most"), LONG, ids=str)
def test_long_prefills(call: Call, most: float) -> None:
    """Few products are of hidden pairs. Barriers: two per tile of keys, and one after the query."""
    count = functools.partial(counting.count_ours, count_bytes=False)
    counts = samples.count_prefill(call, count)
    assert [dispatch.kernel for dispatch in counts.dispatches] == ["fattn_prefill"]
    assert 1.0 <= counts.products_ratio <= most
    rows, keys = tile_of(replace(call, q_len=128, kv_len=128))
    tiles = 0
    for first in range(0, call.q_len, rows):
        seen = call.visible_keys(first)[0], call.visible_keys(first + rows - 1)[1]
        tiles += -(-(seen[1] - seen[0]) // keys)
    assert counts.total("threadgroup_barriers") == 2 * tiles + call.q_len // rows
    hidden = replace(call, causal=False, window_left=-1).least_products / call.least_products
    assert hidden * counts.products_ratio > most, "the control: to visit all keys would be too many"


@pytest.mark.parametrize("name", ["prefill-chunk", "prefill-chunk-wide"])
def test_a_chunk_reads_the_keys_of_its_heads_once(name: str) -> None:
    """The rows of all heads that share keys are packed into as few tiles as possible. Each part reads only
    its own keys, and the partial results are small compared with these."""
    counts = counts_of(name)
    assert [dispatch.kernel.removeprefix("fattn_") for dispatch in counts.dispatches][1:] == ["merge"]
    tiles = 2 if counts.call.head_dim <= 128 else 3  # of 32 rows, and of 16
    assert counts.cache_ratio == pytest.approx(tiles, rel=0.02)
    assert 1.0 <= counts.products_ratio <= 1.2
    assert counts.traffic("partial") <= 0.3 * counts.traffic("key", "value")


def test_full_tiles_of_each_head_read_them_again() -> None:
    """The control: four heads, each in two tiles of 32 rows; the first sees seven eighths of the keys."""
    call = replace(bounds.CASES["prefill-chunk"], q_len=64, kv_len=256)
    assert counting.count_ours(call).cache_ratio == pytest.approx(7.5, rel=0.02)


MASKED = [
    Call("prefill", 4, 1, 64, 1700, 1700, mask="documents:512"),
    Call("prefill", 4, 1, 64, 1700, 1700, mask="documents:512", causal=True),
    Call("prefill", 3, 3, 128, 1100, 1100, mask="causal-documents:512"),
    Call("prefill", 4, 1, 64, 1000, 1000, mask="prefix"),
    Call("prefill", 4, 2, 64, 1000, 1000, mask="blocks"),
    Call("prefill", 2, 1, 192, 1100, 1100, mask="documents:512", causal=True),
    *(
        Call("prefill", 4, 1, head_dim, 1100, 1100, mask=f"documents:{shortest}", causal=causal)
        for head_dim in (64, 128)
        for shortest in (100, 200)  # and half as long again: 100 to 300 tokens
        for causal in (False, True)
    ),
    Call("prefill", 4, 1, 128, 1100, 1100, dtype="bfloat16", mask="documents:100", causal=True),
    Call("prefill", 2, 1, 192, 1100, 1100, mask="documents:100", causal=True),
]


@pytest.mark.parametrize("call", MASKED, ids=str)
def test_hidden_steps_are_skipped(call: Call) -> None:
    counts = counting.count_ours(call, count_bytes=False)
    assert [dispatch.kernel for dispatch in counts.dispatches][0] == "fattn_mask_map"
    assert 1.0 <= counts.products_ratio <= 1.2  # key fragments are skipped in pairs
    everything = replace(call, mask="")
    assert counts.call.least_products < 0.8 * everything.least_products, "the control: much is hidden"


def test_without_a_map_no_step_is_skipped() -> None:
    """The control: without a map every step is visited."""
    call = Call("prefill", 1, 1, 64, 256, 256, mask="documents:100")
    counts = counting.count_ours(call, count_bytes=False)
    assert [dispatch.kernel for dispatch in counts.dispatches] == ["fattn_prefill"]
    everything = replace(call, mask="").least_products
    scores, values = everything / 2, counts.total("products") - everything / 2
    assert scores > 1.5 * call.least_products / 2, "the control: much is hidden"
    assert call.least_products / 2 <= values <= scores, "values that no row sees are left out all the same"


@pytest.mark.parametrize("head_dim", [192, 256, 512])
def test_wide_prefill(head_dim: int) -> None:
    """A barrier for each step of 32 keys and one for the query; each byte once for every 16 rows."""
    call = Call("prefill", 1, 1, head_dim, 256, 256, causal=True)
    counts = counting.count_ours(call)
    assert counts.dispatches[0].kernel == "fattn_prefill_wide"
    assert 1.0 <= counts.products_ratio < 1.05
    assert counts.cache_ratio == counts.distinct_ratio
    keys_of_tiles = range(16, 257, 16)
    assert counts.total("threadgroup_barriers") == sum(1 + -(-keys // 32) for keys in keys_of_tiles)


def test_least_products_by_enumeration() -> None:
    """Blocks of 8 rows x 8 keys that hold a visible pair, one by one."""
    for q_len, kv_len, causal, window in ((20, 50, True, -1), (9, 9, True, 3), (16, 24, False, -1)):
        call = Call("prefill", 1, 1, 16, q_len, kv_len, causal=causal, window_left=window)
        masked = replace(call, mask="documents:6")
        mask = masks.named("documents:6", q_len, kv_len)
        assert not mask.all() and mask.any(1).all()
        blocks, masked_blocks = set(), set()
        for row in range(q_len):
            position = kv_len - q_len + row
            for key in range(kv_len):
                hidden = (causal and key > position) or (window >= 0 and key < position - window)
                if not hidden:
                    blocks.add((row // 8, key // 8))
                    masked_blocks |= {(row // 8, key // 8)} if mask[row, key] else set()
        assert call.least_products == len(blocks) * 4
        assert masked.least_products == len(masked_blocks) * 4 < call.least_products or q_len == 9
