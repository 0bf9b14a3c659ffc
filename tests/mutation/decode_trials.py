"""Trials of decode and paged_decode with heads that a simdgroup has registers for (decode.metal).

The first ones combine as many features as they can, since most mutants die there.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from tests.helpers import direct_launch

from .special_trials import hidden_nan, hidden_scales, huge_sinks, unlikely
from .trial import Trial, bf16, every_option, f16, f32, of_one_launch, of_operands, of_problem, randn

PADDED = ("padded_rows", "padded_rows", "padded_rows")  # no row on a 16-byte boundary
OFF = ("offset", "offset", "token_major")


def decode() -> Iterator[Trial]:
    half = ("decode", f16)
    yield of_problem(
        "decode-edges", *half, 3, 4, 2, 2, 96, 64, 32, seq_lens=(75, 0, 64), token_major_out=True
    )
    yield of_problem(
        "decode-sinks", *half, 2, 8, 2, 1, 600, 64, 32, seq_lens=(600, 513), sinks=True, scale=0.3
    )
    # What two launches would merge with one simdgroup, and with one for each chunk; a sequence without keys.
    yield of_one_launch(
        "decode-short", f16, 2, 18, 6, 1, 500, 64, 32, seq_lens=(500, 0), sinks=True, token_major_out=True
    )
    yield of_one_launch("decode-short-few-heads", f16, 2, 6, 2, 1, 500, 64, 32, seq_lens=(0, 500))
    window: dict[str, Any] = {"window_left": 60, "sink_tokens": 5}
    yield of_problem("decode-wide-window", *half, 1, 2, 1, 2, 100, 64, 32, window_left=300, sink_tokens=3)
    # Key 23 is in the window of some rows, and no sink token.
    yield of_problem("decode-sinks-in-window", *half, 1, 1, 1, 8, 90, 64, 32, window_left=62, sink_tokens=23)
    yield of_problem(
        "decode-window", *half, 2, 2, 1, 2, 700, 64, 32, seq_lens=(530, 301), token_major_out=True, **window
    )
    yield of_problem(
        "decode-far-window", *half, 3, 3, 1, 1, 1100, 64, 32, seq_lens=(1100, 33, 700), window_left=300,
        sink_tokens=64,
    )  # fmt: skip
    yield of_problem("decode-whole-steps", *half, 1, 2, 1, 2, 512, 64, 32, window_left=353, sink_tokens=32)
    yield of_problem(
        "decode-modifiers", *half, 2, 4, 2, 2, 96, 64, 32, seq_lens=(96, 70), mask=f32, softcap=2.0,
        alibi_slopes=True, sinks=True, mask_layout="padded_rows", layouts=OFF,
    )  # fmt: skip
    yield of_problem(
        "decode-alibi", *half, 1, 4, 1, 2, 300, 64, 32, alibi_slopes=True, softcap=30.0, layouts=PADDED
    )
    yield every_option("decode")
    for tree in ("shared", "each"):
        yield of_problem(f"decode-tree-{tree}", *half, 2, 2, 1, 4, 100, 64, 32, seq_lens=(98, 3), tree=tree)
    yield of_problem("decode-tree-end", *half, 1, 2, 1, 2, 66, 64, 32, seq_lens=(66,), tree="shared")
    # The first draft token ends a step, and does not see itself.
    yield of_problem("decode-tree-own", *half, 1, 2, 1, 3, 80, 64, 32, seq_lens=(66,), tree="shared")
    yield of_problem(
        "decode-bool-mask", *half, 2, 4, 2, 2, 70, 64, 32, seq_lens=(70, 41), mask=torch.bool,
        mask_layout="offset",
    )  # fmt: skip
    lengths = (260, *[n % 3 for n in range(67)], 257, 0)
    # Three threadgroups for each head: long sequences are three chunks each, which are dealt.
    yield of_problem("decode-dealt", *half, 4, 24, 8, 1, 1800, 8, 8, seq_lens=(20, 1800, 700, 1600))
    yield of_problem("decode-many", *half, 70, 3, 1, 1, 300, 64, 32, seq_lens=lengths)
    # A run begins within the last sequence, whose chunks are larger than those of the one before.
    short = [n % 3 for n in range(33)]
    yield of_problem("decode-last-cut", *half, 34, 18, 6, 1, 2048, 8, 8, seq_lens=(*short, 2048))
    # A sequence for each lane.
    yield of_problem("decode-32", *half, 32, 3, 1, 1, 300, 64, 32, seq_lens=(*lengths[:31], 257))
    paged = ("paged_decode", f16)
    for block_size, capacity in ((16, 96), (1, 40), (8, 72), (12, 96), (24, 96), (64, 128), (256, 512)):
        yield of_problem(
            f"paged-{block_size}", *paged, 2, 4, 2, 2, capacity, 64, 32,
            seq_lens=(capacity, capacity * 2 // 5), block_size=block_size,
            head_major_pool=block_size % 16 == 0,
        )  # fmt: skip
    yield of_problem(
        "paged-window", *paged, 2, 2, 1, 3, 640, 64, 32, seq_lens=(640, 299), block_size=16, tree="each",
        window_left=90, sink_tokens=20, sinks=True,
    )  # fmt: skip
    for block_size in (16, 12):
        yield _strange_tables(block_size)
    yield hidden_nan("decode", f16, 64, 32)
    yield unlikely("decode", f16, 64, 32)
    yield huge_sinks("decode", f16, 64, 32)
    for slice_size in (2, 5):
        # Chunks and slices as a sequence has them that is too long to be tried here.
        yield of_problem(
            f"decode-slices-of-{slice_size}", *half, 3, 6, 2, 1, 1500, 64, 32, seq_lens=(1500, 0, 1333),
            sinks=True, change=partial(direct_launch.cut, largest_chunk=128, size=slice_size),
        )  # fmt: skip


def other_decode() -> Iterator[Trial]:
    """float32 and bfloat16, more than eight packed rows, heads of every kind of chunk."""
    yield of_problem("decode-18-rows", "decode", f32, 2, 9, 1, 2, 75, 40, 24, seq_lens=(75, 44))
    yield of_problem("decode-f32-chunks", "decode", f32, 1, 16, 1, 2, 2100, 40, 24, layouts=PADDED)
    yield of_problem("decode-32-rows", "decode", f32, 1, 16, 1, 3, 70, 40, 24, sinks=True, tree="shared")
    yield hidden_nan("decode", f32, 40, 24, group=9)
    yield of_problem(
        "decode-f32-mask", "decode", f32, 1, 16, 1, 2, 50, 40, 24, mask=f16, alibi_slopes=True, softcap=3.0
    )
    yield of_problem(
        "decode-bf16", "decode", bf16, 2, 2, 1, 2, 300, 72, 16, seq_lens=(300, 9), mask=bf16, sinks=True
    )
    yield of_problem(
        "paged-bf16", "paged_decode", bf16, 2, 2, 1, 2, 320, 72, 16, seq_lens=(300, 9), block_size=16
    )
    yield of_problem("decode-16-rows", "decode", f16, 1, 16, 1, 1, 600, 8, 8, seq_lens=(600,))
    # One chain of 128 roundings would exceed the accuracy rule.
    yield of_problem("decode-f32-long-sums", "decode", f32, 1, 3, 1, 1, 60, 128, 96, scale=1.0)
    yield of_problem("decode-long-head", "decode", f16, 1, 3, 1, 1, 60, 16, 128, seq_lens=(60,))
    yield from _quantised()


def _quantised() -> Iterator[Trial]:
    """Lengths that end within a step, heads of other scales, blocks that end within a fragment."""
    int8: dict[str, Any] = {"kv_format": "int8"}
    decode, paged = ("decode", f16), ("paged_decode", f16)
    yield of_problem("decode-int8", *decode, 2, 4, 2, 2, 300, 64, 32, seq_lens=(289, 21), **int8)
    yield of_problem(
        "decode-int8-window", *decode, 1, 2, 1, 2, 300, 64, 32, window_left=60, sink_tokens=5, **int8
    )
    # Several chunks of a key and of a value in a lane.
    yield of_problem("decode-int8-chunks", *decode, 1, 2, 1, 1, 60, 96, 96, **int8)
    yield of_problem("decode-int8-padded", *decode, 1, 2, 2, 1, 60, 64, 32, layouts=PADDED, **int8)
    for block_size in (16, 12):
        yield of_problem(
            f"paged-int8-{block_size}", *paged, 2, 4, 2, 2, 96, 64, 32, seq_lens=(93, 37),
            block_size=block_size, head_major_pool=block_size == 16, **int8,
        )  # fmt: skip
        yield _strange_tables(block_size, "int8")
    yield hidden_scales("decode", f16, 64, 32, group=2)
    fp8: dict[str, Any] = {"kv_format": "fp8_e4m3"}
    yield of_problem(
        "decode-fp8", "decode", f32, 2, 4, 2, 2, 90, 40, 24, seq_lens=(90, 21), sinks=True, **fp8
    )
    yield of_problem(
        "decode-fp8-unscaled", "decode", f32, 1, 4, 2, 2, 90, 40, 24, layouts=PADDED,
        kv_format="fp8_e4m3_unscaled",
    )  # fmt: skip
    yield hidden_nan("decode", f32, 40, 24, kv_format="fp8_e4m3")
    int4: dict[str, Any] = {"kv_format": "int4"}
    yield of_problem("decode-int4", *decode, 2, 4, 2, 2, 90, 64, 96, seq_lens=(90, 21), **int4)
    yield of_problem(
        "paged-int4", *paged, 2, 4, 2, 2, 96, 64, 96, seq_lens=(93, 37), block_size=16, layouts=PADDED, **int4
    )
    yield hidden_nan("decode", f16, 64, 96, kv_format="int4")


def _strange_tables(block_size: int, kv_format: str = "auto") -> Trial:
    """Lengths and blocks out of range are no keys."""
    pools = {name: randn(f16, 6, block_size, 1, dim) for name, dim in (("key", 64), ("value", 32))}
    quantised: dict[str, Any] = {}
    if kv_format == "int8":
        pools = {name: (pool * 30).to(torch.int8) for name, pool in pools.items()}
        scales = {f"{name}_scales": randn(f32, 6, block_size, 1).abs() / 30 for name in pools}
        quantised = {"kv_format": kv_format, **scales}
    # Every other entry of a storage.
    tables = torch.tensor([[0, 9, 2, -5], [3, 1, -1, 6], [5, 5, 5, 5]], dtype=torch.int32)
    tables = tables.repeat_interleave(2, dim=1)[:, ::2]
    return of_operands(
        "-".join(["strange-tables", *([kv_format] if quantised else []), str(block_size)]),
        "paged_decode",
        query=randn(f16, 3, 2, 2, 64),
        key_cache=pools["key"],
        value_cache=pools["value"],
        block_tables=tables,
        seq_lens=torch.tensor([4 * block_size, 7, 1000, 7, -3], dtype=torch.int32)[::2],
        **quantised,
    )
