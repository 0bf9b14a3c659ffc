"""The calls that mutants are tried on: small calls of every op with many edges.

Trials that share a pipeline are adjacent, because one compilation serves them all. The main pipelines of all
kernels come first, so that a fault in a shared header is found early.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch

from tests.helpers import direct_launch

from .backward_trials import backward, other_backward
from .decode_trials import decode, other_decode
from .prefill_trials import other_prefill, prefill
from .prefill_wide_trials import other_prefill_wide, prefill_wide
from .tensor_trials import tensor
from .trial import Plan, Trial, bf16, f16, f32, of_logits, of_map, of_operands, of_write, randn
from .vector_trials import other_vector, vector
from .wide_trials import other_wide, wide


def _merge() -> Iterator[Trial]:
    for name, dtype, parts, columns in (
        ("merge", f32, 9, 200),
        ("merge-40-parts", f16, 40, 24),
        ("merge-128-columns", f16, 12, 128),
        ("merge-12-parts", bf16, 12, 300),
    ):
        outs, lses = randn(dtype, parts, 2, 2, 3, columns), randn(f32, parts, 2, 2, 3) * 5
        lses[1, 0, 0] = -torch.inf
        lses[:, 1, 1, 0] = -torch.inf
        outs[1, 0, 0] = torch.nan
        yield of_operands(name, "merge", 1e-5 if dtype == f32 else 0.02, outs=outs, lses=lses)


def _write() -> Iterator[Trial]:
    """A pass and a half of columns, rows of every kind, pools with gaps; 15 slots and tokens beyond them."""
    half = (23, 3, 96, 64, 3, 5)
    full = (23, 3, 192, 96, 3, 5)
    yield of_write("float", bf16, 11, *full[1:], pool_layout="offset", row_layout="offset", long_slots=False)
    yield of_write("float", bf16, *full, name="write-float-aligned")
    yield of_write("float", bf16, *full, name="write-latent", value_in_key=True)
    for kv_format, dtype, sizes, layouts in (
        ("int8", f32, full, ("padded", "padded")),
        ("fp8_e4m3", f16, half, ("hnd", "offset")),
        ("fp8_e4m3_unscaled", f16, half, ("offset", "offset")),
        ("int4", f32, full, ("slot_gaps", "padded")),
    ):
        yield of_write(kv_format, dtype, *sizes, pool_layout=layouts[0], row_layout=layouts[1], special=True)
        yield of_write(kv_format, dtype, *sizes, name=f"write-{kv_format}-aligned", special=True)


def _logits() -> Iterator[Trial]:
    """Rows of one simdgroup and of several, on vector boundaries and off them; longer ones than the threads
    hold; rows that one, two and five strides lead to; values that must not spread."""
    yield of_logits("softmax", f32, (3, 2, 70), "padded", 0.0)
    yield of_logits("softmax", f16, (3, 2, 72), "padded", 5.0)
    yield of_logits("softmax", f16, (6, 1300), "offset", 5.0)
    yield of_logits("softmax", f32, (2, 33000), "contiguous", 0.0)
    yield of_logits("softmax", f32, (6, 16390), "contiguous", 0.0)  # a short last block, hidden in a row
    yield of_logits("softmax", bf16, (2, 1, 3, 2, 2, 3, 40), "padded", 0.0)
    yield of_logits("softmax", f32, (9, 600), "padded", 0.0, slice_size=4)
    yield of_logits("softmax", bf16, (2, 256), "every_other", 0.0)
    yield of_logits("softcap", f32, (2, 99), "padded", 5.0)
    yield of_logits("softcap", f32, (3, 33), "every_other", 5.0)
    yield of_logits("softcap", f32, (3, 2, 72), "padded", 5.0)
    yield of_logits("softcap", f16, (9, 1001), "offset", 5.0, slice_size=2)
    yield of_logits("softcap", f16, (9, 1001), "contiguous", 5.0)
    # The first threadgroups of more than 2^32 elements.
    yield of_logits("softcap", f32, (1, 2048), "every_other", 5.0, change=_lengthen)
    yield of_logits("softcap", bf16, (2, 1, 3, 2, 2, 3, 39), "padded", 5.0)


def _lengthen(plan: Plan) -> None:
    (step,) = plan["passes"]
    direct_launch.lengthen_rows(step, 2**32 + 64)


def _maps() -> Iterator[Trial]:
    yield of_map(f32, 2, 3, 100, 600, slice_size=7)
    yield of_map(torch.bool, 1, 2, 70, 300)
    yield of_map(f16, 1, 2, 70, 300)
    yield of_map(bf16, 1, 2, 70, 300)
    yield of_map(bf16, 1, 2, 70, 300, layout="every_other")


@cache
def all_trials() -> tuple[Trial, ...]:
    return (
        *(*decode(), *wide(), *vector(), *prefill(), *prefill_wide(), *tensor(), *backward()),
        *(*_merge(), *_write(), *_logits(), *_maps()),
        *(*other_decode(), *other_wide(), *other_vector(), *other_prefill(), *other_prefill_wide()),
        *other_backward(),
    )
