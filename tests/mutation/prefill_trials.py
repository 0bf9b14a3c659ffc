"""Trials of prefill and paged_prefill (prefill.metal)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

import torch_fattn.reference as reference
from tests.helpers import direct_launch

from .special_trials import hidden_nan, huge_sinks, unlikely
from .trial import Plan, Trial, bf16, every_option, f16, f32, of_operands, of_problem, randn

PADDED = ("padded_rows", "padded_rows", "padded_rows")  # no row on a 16-byte boundary
OFF = ("offset", "offset", "token_major")
# Chunks of prompts, tokens, and sequences without rows, in one call.
MIXED: dict[str, Any] = {"q_lens": (50, 1, 0, 7), "seq_lens": (113, 65, 9, 7), "spare_rows": 2}
MIXED_SIZES = (4, 6, 2, 50, 128)
MAPPED: dict[str, Any] = {"mask_pattern": "patches", "mask_map": True}


def prefill() -> Iterator[Trial]:
    half = ("prefill", f16)
    causal: dict[str, Any] = {"causality": "bottom_right"}
    yield of_problem("prefill-causal", *half, 1, 4, 2, 80, 150, 64, 32, **causal)
    yield of_problem(
        "prefill-full", *half, 2, 2, 1, 70, 75, 64, 32, layouts=PADDED, scale=0.3, token_major_out=True
    )
    yield of_problem(
        "prefill-mask", *half, 2, 2, 1, 33, 70, 64, 32, mask=f16, mask_layout="padded_rows", layouts=OFF
    )
    yield of_problem("prefill-bool-mask", *half, 1, 2, 1, 33, 64, 64, 32, mask=torch.bool, **causal)
    for offset in (0, -40, 60, 1, 31):  # of 1 and 31, steps begin and end with a tile's rows
        yield of_problem(
            f"prefill-offset{offset}", *half, 1, 2, 1, 150, 130, 64, 32, causality="offset", q_offset=offset
        )
    yield of_problem("prefill-one-row", *half, 2, 2, 2, 1, 9, 64, 32, **causal)
    # Rows so far behind the keys that their window has none.
    yield of_problem(
        "prefill-sinks-alone", *half, 1, 2, 1, 20, 40, 64, 32, causality="offset", q_offset=60, window_left=5,
        sink_tokens=9,
    )  # fmt: skip
    yield hidden_nan("prefill", f16, 64, 32)
    yield unlikely("prefill", f16, 64, 32)
    yield huge_sinks("prefill", f16, 64, 32)
    yield from _mapped()
    yield from _parts()
    yield from _options()
    yield from _packed()


def other_prefill() -> Iterator[Trial]:
    """float32, bfloat16 and quantised pools."""
    causal: dict[str, Any] = {"causality": "bottom_right"}
    yield of_problem("prefill-f32", "prefill", f32, 1, 2, 1, 43, 75, 40, 24, mask=f32, **causal)
    yield hidden_nan("prefill", f32, 40, 24)
    yield of_problem("prefill-f32-full", "prefill", f32, 1, 2, 1, 43, 75, 40, 24, layouts=OFF)
    yield of_problem("prefill-bf16", "prefill", bf16, 1, 2, 1, 70, 100, 72, 16, mask=bf16, layouts=PADDED)
    yield of_problem("prefill-f16-long-head", "prefill", f16, 1, 1, 1, 30, 40, 16, 128, **causal)
    # More threads than the tile has chunks, and keys that end with a step.
    yield of_problem("prefill-narrow", "prefill", f16, 1, 1, 1, 30, 64, 8, 16)
    yield of_problem(
        "prefill-f32-map", "prefill", f32, 1, 1, 1, 50, 200, 72, 24, mask=f32, **MAPPED, **causal
    )
    yield of_problem("prefill-rows8-map", "prefill", f16, 1, 1, 1, 90, 200, 96, 16, mask=torch.bool, **MAPPED)
    yield from _other_packed()
    yield from _early()


def _other_packed() -> Iterator[Trial]:
    """Few rows, and quantised pools."""
    causal: dict[str, Any] = {"causality": "bottom_right"}
    yield of_problem(
        "packed-few-rows", "paged_prefill", f16, 2, 2, 1, 9, 48, 64, 32, q_lens=(9, 1), seq_lens=(48, 30),
        block_size=24, **causal,
    )  # fmt: skip
    # Keys below the window share a step with visible ones, and their scales are NaN.
    yield of_problem(
        "packed-int8-near", "paged_prefill", f16, *MIXED_SIZES, 64, 32, block_size=16, kv_format="int8",
        window_left=20, **MIXED, **causal,
    )  # fmt: skip
    for kv_format, dtype, dims in (
        ("int8", f16, (64, 32)),
        ("int4", bf16, (64, 96)),
        ("fp8_e4m3", f32, (40, 24)),
    ):
        yield of_problem(
            f"packed-{kv_format}", "paged_prefill", dtype, *MIXED_SIZES, *dims, block_size=16,
            kv_format=kv_format, window_left=70, **MIXED, **causal,
        )  # fmt: skip
        yield of_problem(
            f"packed-{kv_format}-padded", "paged_prefill", dtype, *MIXED_SIZES, *dims, block_size=32,
            kv_format=kv_format, layouts=PADDED, **MIXED,
        )  # fmt: skip


def _early() -> Iterator[Trial]:
    """As planned for M3 and later: early loads for whole and ragged steps, one range and two, a map, blocks,
    and elements that the threads cannot share evenly; native bfloat."""

    def early(name: str, *sizes: int, op: str = "prefill", dtype: torch.dtype = f16, **options: Any) -> Trial:
        return of_problem(name, op, dtype, *sizes, change=as_newer_chips, **options)

    causal: dict[str, Any] = {"causality": "bottom_right"}
    dims = (64, 32)
    packed: dict[str, Any] = {"op": "paged_prefill", **MIXED, **causal}
    yield early("prefill-early", 1, 2, 1, 80, 150, *dims, **causal)
    yield early("prefill-early-full", 1, 2, 1, 70, 139, 72, 40, layouts=OFF)
    yield early("prefill-early-window", 1, 2, 1, 80, 300, *dims, window_left=70, sink_tokens=40, **causal)
    yield early("prefill-early-map", 1, 1, 1, 60, 420, *dims, mask=f16, **MAPPED, **causal)
    yield early("prefill-early-offset", 1, 2, 1, 150, 130, *dims, causality="offset", q_offset=-40)
    yield early("packed-early", *MIXED_SIZES, *dims, block_size=16, **packed)
    yield early("packed-early-int8", *MIXED_SIZES, *dims, block_size=32, kv_format="int8", **packed)
    yield early("prefill-native-bf16", 1, 2, 1, 43, 75, *dims, dtype=bf16, **causal)


def as_newer_chips(plan: Plan) -> None:
    (step,) = plan["passes"]
    assert step["macros"]["FATTN_EARLY_LOADS"] == step["macros"]["FATTN_NATIVE_BFLOAT"] == "false"
    step["macros"]["FATTN_EARLY_LOADS"] = "true"
    step["macros"]["FATTN_NATIVE_BFLOAT"] = "true" if step["macros"]["FATTN_T"] == "bfloat" else "false"


def _mapped() -> Iterator[Trial]:
    """Masks in patches, and their maps: more columns than are looked up at once, ragged rows, gaps."""
    half, dims = ("prefill", f16), (64, 32)
    causal: dict[str, Any] = {"causality": "bottom_right"}
    yield of_problem("prefill-map", *half, 2, 2, 1, 150, 420, *dims, mask=f16, **MAPPED, **causal)
    yield of_problem("prefill-map-few-rows", *half, 1, 4, 1, 20, 1180, *dims, mask=torch.bool, **MAPPED)
    yield of_problem(
        "prefill-map-window", *half, 1, 2, 1, 80, 700, *dims, mask=torch.bool, window_left=90, sink_tokens=40,
        **MAPPED, **causal,
    )  # fmt: skip
    yield of_problem(
        "prefill-map-broadcast", *half, 1, 2, 1, 40, 100, *dims, mask=torch.bool, mask_map=True,
        mask_broadcast=(True, True, False, True), **causal,
    )  # fmt: skip
    yield _strange_map()
    yield _last_row_in_a_map()


def _parts() -> Iterator[Trial]:
    """More parts than some tiles have steps for, of one range of keys and of two, and of packed tiles; two
    groups of three heads to a tile."""
    half, dims = ("prefill", f16), (64, 32)
    yield of_problem(
        "prefill-parts", *half, 2, 6, 2, 25, 260, *dims, causality="offset", q_offset=9, sinks=True,
        change=in_parts,
    )  # fmt: skip
    yield of_problem(
        "prefill-parts-window", *half, 1, 2, 1, 70, 500, *dims, causality="bottom_right", window_left=190,
        sink_tokens=100, sinks=True, change=in_parts,
    )  # fmt: skip
    # Parts of whole steps, each with another behind it.
    yield of_problem(
        "prefill-parts-causal", *half, 1, 6, 2, 25, 260, *dims, causality="bottom_right", sinks=True,
        change=in_parts,
    )  # fmt: skip
    # The first tile sees no key.
    yield of_problem(
        "prefill-parts-nothing", *half, 1, 2, 1, 100, 150, *dims, causality="offset", q_offset=-64,
        sinks=True, change=in_parts,
    )  # fmt: skip
    yield of_problem(
        "packed-parts", "paged_prefill", f16, *MIXED_SIZES, *dims, causality="bottom_right", block_size=16,
        change=in_parts, **MIXED,
    )  # fmt: skip


def in_parts(plan: Plan) -> None:
    direct_launch.cut_prefill(plan, 4, 2)


def _options() -> Iterator[Trial]:
    """Windows with whole steps in both ranges and a gap between them, sinks, and what modifies scores."""
    half = ("prefill", f16)
    causal: dict[str, Any] = {"causality": "bottom_right"}
    yield of_problem(
        "prefill-window", *half, 1, 2, 1, 80, 300, 64, 32, window_left=70, sink_tokens=40, sinks=True,
        **causal,
    )  # fmt: skip
    yield of_problem(
        "prefill-window-right", *half, 1, 2, 1, 90, 100, 64, 32, window_left=9, window_right=11, sink_tokens=3
    )
    yield of_problem(
        "prefill-right", *half, 1, 1, 1, 70, 150, 64, 32, window_right=11, sink_tokens=90, sinks=True
    )
    yield of_problem(
        "prefill-window-from-before", *half, 1, 1, 1, 90, 70, 64, 32, causality="offset", q_offset=-20,
        window_left=33,
    )  # fmt: skip
    yield of_problem(
        "prefill-modifiers", *half, 2, 4, 2, 40, 70, 64, 32, mask=f16, softcap=2.0, alibi_slopes=True,
        sinks=True, **causal,
    )  # fmt: skip
    yield of_problem("prefill-alibi", *half, 1, 2, 1, 70, 70, 64, 32, alibi_slopes=True, softcap=30.0)
    yield every_option("prefill", **causal)
    yield of_problem("prefill-slices", *half, 2, 3, 1, 150, 70, 64, 32, change=in_slices, **causal)


def in_slices(plan: Plan) -> None:
    (step,) = plan["passes"]
    direct_launch.cut_into_slices(step, 4)


def _packed() -> Iterator[Trial]:
    """Blocks that end within a step and not, more sequences than lanes, bounds out of range."""
    sizes = (*MIXED_SIZES, 64, 32)
    causal: dict[str, Any] = {"causality": "bottom_right"}
    for block_size, more in ((16, causal), (64, causal), (8, {}), (1, causal)):
        yield of_problem(
            f"packed-{block_size}", "paged_prefill", f16, *sizes, block_size=block_size,
            head_major_pool=block_size == 16, **MIXED, **more,
        )  # fmt: skip
    yield of_problem(
        "packed-window", "paged_prefill", f16, *sizes, block_size=16, window_left=20, sink_tokens=9,
        sinks=True, alibi_slopes=True, **MIXED, **causal,
    )  # fmt: skip
    many = [(n + 1) % 3 for n in range(40)]
    yield of_problem(
        "packed-many", "paged_prefill", f16, 40, 2, 1, 70, 96, 64, 32, q_lens=(*many[:39], 70),
        seq_lens=(*(n + 5 for n in many[:39]), 90), block_size=32, spare_rows=3, **causal,
    )  # fmt: skip
    # With the spare rows, as many sequences as a simdgroup has lanes, and one more.
    for count in (30, 31):
        yield of_problem(
            f"packed-{count}", "paged_prefill", f16, count, 2, 1, 9, 48, 64, 32, q_lens=(9,) * count,
            seq_lens=(48,) * count, block_size=16, spare_rows=3, **causal,
        )  # fmt: skip
    yield _strange_bounds()
    # Trees with more rows than a decode has, and rows of a quantised cache that is not paged.
    for kv_format in ("float", "int8"):
        yield of_problem(
            f"tree-{kv_format}", "decode", f16, 2, 4, 2, 40, 96, 64, 32, seq_lens=(90, 20), tree="each",
            kv_format=kv_format, sinks=True,
        )  # fmt: skip
    yield _no_keys()
    yield _three_keys_in_a_mask()
    yield from _packed_keys()


def _packed_keys() -> Iterator[Trial]:
    """Whole and ragged steps of several sequences, without keys and without rows; any offset, any starts."""
    lengths: dict[str, Any] = {"q_lens": (70, 1, 9, 0, 20), "seq_lens": (113, 65, 0, 30, 37), "spare_rows": 3}
    sizes = (5, 4, 2, 70, 120, 64, 32)
    for name, options in (
        ("varlen", {"causality": "bottom_right"}),
        ("varlen-offset", {"causality": "offset", "q_offset": 11, "alibi_slopes": True}),
        ("varlen-window", {"window_left": 40, "window_right": 9, "sink_tokens": 7, "layouts": PADDED}),
    ):
        yield of_problem(name, "varlen_prefill", f16, *sizes, **lengths, **options)
    yield of_operands(
        "varlen-strange-starts",
        "varlen_prefill",
        query=randn(f16, 90, 2, 64),
        key=randn(f16, 80, 1, 64),
        value=randn(f16, 80, 1, 32),
        cu_seqlens_q=torch.tensor([3, 9, 20, 50, 80], dtype=torch.int32),
        cu_seqlens_k=torch.tensor([-5, 70, 2**31 - 1, 20, -(2**31)], dtype=torch.int32),
        max_seqlen_q=40,
        max_seqlen_k=60,
        is_causal=True,
    )


def _strange_map() -> Trial:
    """No byte of the map has a meaning, though their parts have: every cell counts as mixed."""
    hidden_with_fragments, neither = 0b111100, 3
    cells = torch.tensor([hidden_with_fragments, neither, 255], dtype=torch.uint8)
    return of_operands(
        "prefill-map-strange",
        "prefill",
        query=randn(f16, 1, 1, 40, 64),
        key=randn(f16, 1, 1, 90, 64),
        value=randn(f16, 1, 1, 90, 32),
        attn_mask=randn(f32, 1, 1, 40, 90) > -1.0,
        mask_map=cells.expand(1, 1, 3, 3).contiguous(),
    )


def _last_row_in_a_map() -> Trial:
    """The last row of a tile has its own cells, and alone sees the first keys."""
    mask = torch.ones(1, 1, 33, 90, dtype=torch.bool)
    mask[:, :, :32, :64] = False
    return of_operands(
        "prefill-map-last-row",
        "prefill",
        query=randn(f16, 1, 1, 33, 64),
        key=randn(f16, 1, 1, 90, 64),
        value=randn(f16, 1, 1, 90, 32),
        attn_mask=mask,
        mask_map=reference.mask_map(mask).to(torch.uint8),
    )


def _three_keys_in_a_mask() -> Trial:
    """The rows see the last three keys of a step; the values of all others are NaN."""
    seen = torch.arange(40) >= 37
    value = randn(f16, 1, 1, 40, 32)
    value[:, :, ~seen] = torch.nan
    return of_operands(
        "three-keys-in-a-mask",
        "prefill",
        query=randn(f16, 1, 1, 2, 64),
        key=randn(f16, 1, 1, 40, 64),
        value=value,
        attn_mask=seen[None, None, None].expand(1, 1, 2, 40).contiguous(),
    )


def _no_keys() -> Trial:
    """A sequence without keys has rows, and some starts are below earlier ones."""
    return of_operands(
        "packed-no-keys",
        "paged_prefill",
        query=randn(f16, 60, 2, 64),
        key_cache=randn(f16, 6, 16, 1, 64),
        value_cache=randn(f16, 6, 16, 1, 32),
        cu_seqlens_q=torch.tensor([0, 30, 5, 6, 50, 60], dtype=torch.int32),
        max_seqlen_q=60,
        block_tables=torch.tensor([[0, 1, 2, 3]] * 5, dtype=torch.int32),
        seq_lens=torch.tensor([0, 40, 40, 50, 60], dtype=torch.int32),
        is_causal=True,
    )


def _strange_bounds() -> Trial:
    """Bounds, lengths and blocks out of range: every row still has a result."""
    return of_operands(
        "packed-strange-bounds",
        "paged_prefill",
        query=randn(f16, 90, 2, 64),
        key_cache=randn(f16, 6, 16, 1, 64),
        value_cache=randn(f16, 6, 16, 1, 32),
        cu_seqlens_q=torch.tensor([3, 9, 7, 40, -2], dtype=torch.int32),
        max_seqlen_q=90,
        block_tables=torch.tensor(
            [[0, 9, 2, -5], [3, 1, -1, 6], [5, 5, 5, 5], [1, 2, 3, 4]], dtype=torch.int32
        ),
        seq_lens=torch.tensor([64, 7, 1000, -3], dtype=torch.int32),
        is_causal=True,
    )
