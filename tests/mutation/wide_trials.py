"""Trials of decode with wide heads, and with values that are columns of their keys (decode_wide.metal)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from tests.helpers import direct_launch

from .special_trials import hidden_nan, hidden_scales, huge_sinks, unlikely
from .trial import Trial, bf16, f16, f32, of_problem

PADDED = ("padded_rows", "padded_rows", "padded_rows")


def wide() -> Iterator[Trial]:
    """Two row groups of heads that do not divide evenly."""
    half, paged = ("decode", f16), ("paged_decode", f16)
    uneven = (136, 200)
    yield of_problem(
        "wide-edges", *half, 2, 5, 1, 3, 75, *uneven, seq_lens=(69, 0), sinks=True, token_major_out=True
    )
    yield of_problem(
        "wide-modifiers", *half, 1, 12, 2, 2, 70, *uneven, mask=f32, softcap=2.0, alibi_slopes=True,
        sinks=True, layouts=PADDED,
    )  # fmt: skip
    yield of_problem(
        "wide-window", *half, 2, 5, 1, 3, 400, *uneven, seq_lens=(390, 31), window_left=60, sink_tokens=5,
        sinks=True, tree="each",
    )  # fmt: skip
    for block_size in (16, 12):
        yield of_problem(
            f"wide-paged-{block_size}", *paged, 2, 10, 2, 2, 96, *uneven, seq_lens=(93, 37),
            block_size=block_size,
        )  # fmt: skip
    yield of_problem(
        "wide-slices", *half, 2, 20, 2, 1, 600, *uneven, seq_lens=(600, 333),
        change=partial(direct_launch.cut, largest_chunk=256, size=3),
    )  # fmt: skip
    yield hidden_nan("decode", f16, *uneven, group=5)


def other_wide() -> Iterator[Trial]:
    """Heads that divide evenly, four row groups, and latent heads, of which a lane has several chunks."""
    half, uneven = ("decode", f16), (136, 200)
    yield unlikely("decode", f16, 192, 128)
    yield huge_sinks("decode", f16, 192, 128)
    yield of_problem("wide-192", *half, 1, 6, 2, 1, 300, 192, 128, seq_lens=(291,))
    yield of_problem("wide-four-groups", *half, 1, 9, 1, 3, 40, 24, 328, seq_lens=(39,))
    yield of_problem("wide-f32", "decode", f32, 1, 3, 1, 1, 16, *uneven, seq_lens=(16,))
    yield of_problem("wide-bf16", "decode", bf16, 1, 3, 1, 1, 40, 256, 256, seq_lens=(37,), mask=torch.bool)
    latent: dict[str, Any] = {"value_in_key": True}
    yield of_problem(
        "latent-paged", "paged_decode", f32, 1, 4, 1, 2, 64, 64, 40, seq_lens=(61,), block_size=16, **latent
    )
    yield of_problem("latent", *half, 1, 8, 1, 1, 60, 576, 512, seq_lens=(57,), **latent)
    yield from _quantised()


def _quantised() -> Iterator[Trial]:
    half = ("decode", f16)
    yield of_problem(
        "wide-int8", *half, 2, 5, 1, 3, 75, 136, 200, seq_lens=(69, 0), sinks=True, kv_format="int8"
    )
    yield of_problem(
        "wide-int8-paged", "paged_decode", f16, 2, 10, 2, 2, 96, 136, 200, seq_lens=(93, 37), block_size=16,
        window_left=30, kv_format="int8",
    )  # fmt: skip
    yield hidden_scales("decode", f16, 136, 200, group=5)
    yield of_problem(
        "latent-int4", "paged_decode", f32, 1, 4, 1, 2, 64, 96, 64, seq_lens=(61,), block_size=16,
        value_in_key=True, kv_format="int4",
    )  # fmt: skip
    yield of_problem(
        "wide-fp8", "decode", bf16, 1, 2, 2, 2, 40, 192, 128, seq_lens=(37,), kv_format="fp8_e4m3"
    )
    yield hidden_nan("decode", bf16, 192, 128, kv_format="fp8_e4m3")
    yield of_problem(
        "latent-int8", *half, 1, 8, 1, 1, 60, 576, 512, seq_lens=(57,), value_in_key=True, kv_format="int8"
    )
