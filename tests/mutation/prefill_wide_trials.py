"""Trials of prefill and paged_prefill with wide heads (prefill_wide.metal)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from .prefill_trials import MAPPED, MIXED, MIXED_SIZES, OFF, PADDED, as_newer_chips, in_parts, in_slices
from .special_trials import chains, hidden_nan, huge_sinks, unlikely
from .trial import Trial, bf16, f16, f32, of_problem

CAUSAL: dict[str, Any] = {"causality": "bottom_right"}


def prefill_wide() -> Iterator[Trial]:
    """Heads that do not divide evenly."""
    half, uneven = ("prefill", f16), (136, 200)
    yield of_problem("prefill-wide-causal", *half, 1, 4, 2, 50, 100, *uneven, **CAUSAL)
    yield of_problem(
        "prefill-wide-modifiers", *half, 2, 2, 1, 20, 70, *uneven, mask=f16, softcap=2.0, alibi_slopes=True,
        sinks=True, layouts=PADDED, **CAUSAL,
    )  # fmt: skip
    yield of_problem(
        "prefill-wide-window", *half, 1, 2, 1, 40, 200, *uneven, window_left=70, sink_tokens=40, sinks=True,
        **CAUSAL,
    )  # fmt: skip
    yield of_problem("prefill-wide-map", *half, 2, 2, 1, 70, 200, *uneven, mask=f16, **MAPPED, **CAUSAL)
    yield of_problem("prefill-wide-slices", *half, 2, 3, 1, 70, 70, *uneven, change=in_slices, **CAUSAL)
    yield of_problem(
        "packed-wide", "paged_prefill", f16, *MIXED_SIZES, *uneven, block_size=16, window_left=20,
        sink_tokens=9, **MIXED, **CAUSAL,
    )  # fmt: skip
    yield of_problem(
        "prefill-wide-parts", *half, 2, 6, 2, 5, 260, *uneven, sinks=True, change=in_parts, **CAUSAL
    )
    yield hidden_nan("prefill", f16, *uneven)
    yield unlikely("prefill", f16, *uneven)
    yield huge_sinks("prefill", f16, *uneven)


def other_prefill_wide() -> Iterator[Trial]:
    """Heads that divide evenly, shares of the sums, groups of rows, and quantised pools."""
    half = ("prefill", f16)
    yield of_problem("prefill-wide-192", *half, 1, 2, 1, 40, 90, 192, 128, **CAUSAL)
    yield of_problem("prefill-wide-shares", *half, 1, 1, 1, 20, 70, 280, 264, layouts=OFF)
    # The narrow columns of keys begin with the first; on M3 and later, values are loaded early.
    yield of_problem(
        "prefill-wide-early-values", *half, 1, 2, 1, 40, 90, 24, 264, change=as_newer_chips, **CAUSAL
    )
    yield of_problem("prefill-wide-f32", "prefill", f32, 1, 2, 1, 20, 75, 136, 24, mask=f32, **CAUSAL)
    yield of_problem("prefill-wide-f32-shares", "prefill", f32, 1, 1, 1, 20, 40, 288, 24, **CAUSAL)
    yield of_problem("prefill-wide-bf16", "prefill", bf16, 1, 2, 1, 30, 40, 256, 256, mask=torch.bool)
    ones, int8 = torch.ones(1, 1, 8, 576), torch.ones(1, 16, 1, 576, dtype=torch.int8)
    yield chains(
        "prefill-wide-f32-chains", "prefill", query=ones, key=ones[:, :, :1], value=ones[:, :, :1, :24]
    )
    yield chains(
        "packed-wide-int8-chains", "paged_prefill", query=ones[0].transpose(0, 1), key_cache=int8,
        value_cache=int8[..., :24], key_scales=torch.ones(1, 16, 1), value_scales=torch.ones(1, 16, 1),
        block_tables=torch.zeros(1, 1, dtype=torch.int32), seq_lens=torch.ones(1, dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, 8], dtype=torch.int32), max_seqlen_q=8, is_causal=False,
    )  # fmt: skip
    few = (2, 2, 1, 3, 48)
    yield of_problem(
        "packed-wide-few-rows", "paged_prefill", f16, *few, 192, 40, q_lens=(3, 1), seq_lens=(48, 30),
        block_size=24, **CAUSAL,
    )  # fmt: skip
    # The last sequence ends within the last fragment of a step.
    yield of_problem(
        "packed-wide-int8-values", "paged_prefill", f16, *few, 24, 264, q_lens=(3, 1), seq_lens=(48, 30),
        block_size=24, kv_format="int8", **CAUSAL,
    )  # fmt: skip
    for kv_format, dtype, dims in (
        ("int8", f16, (136, 24)),
        ("int4", bf16, (160, 32)),
        ("fp8_e4m3", f32, (136, 24)),
    ):
        yield of_problem(
            f"packed-wide-{kv_format}", "paged_prefill", dtype, *MIXED_SIZES, *dims, block_size=16,
            kv_format=kv_format, window_left=70, **MIXED, **CAUSAL,
        )  # fmt: skip
    yield of_problem(
        "prefill-wide-native-bf16",
        "prefill",
        bf16,
        1,
        2,
        1,
        30,
        40,
        136,
        200,
        change=as_newer_chips,
        **CAUSAL,
    )
