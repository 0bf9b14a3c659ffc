"""Trials of decode with one or two packed rows (decode_vector.metal)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from tests.helpers import direct_launch

from .special_trials import lengths
from .trial import Trial, bf16, f16, f32, of_one_launch, of_operands, of_problem, randn

PADDED = ("padded_rows", "padded_rows", "padded_rows")


def vector() -> Iterator[Trial]:
    """Two rows; lanes with a chunk past the end of a key, and of a value."""
    half, paged = ("decode", f16), ("paged_decode", f16)
    dims = (80, 40)
    yield of_problem(
        "vector-edges", *half, 3, 2, 2, 2, 96, *dims, seq_lens=(75, 0, 64), sinks=True, token_major_out=True
    )
    yield of_problem(
        "vector-window", *half, 2, 2, 1, 1, 1100, *dims, seq_lens=(1100, 33), window_left=300, sink_tokens=64
    )
    yield of_problem(
        "vector-modifiers", *half, 2, 4, 2, 1, 96, *dims, seq_lens=(96, 70), mask=f32, softcap=2.0,
        alibi_slopes=True, sinks=True, layouts=PADDED,
    )  # fmt: skip
    # One launch, as decode-short.
    yield of_one_launch("vector-short", f16, 2, 8, 8, 1, 700, *dims, seq_lens=(700, 300), sinks=True)
    yield of_problem("vector-tree", *half, 2, 2, 2, 2, 66, *dims, seq_lens=(66, 33), tree="each")
    many = (260, *[n % 3 for n in range(38)], 257, 0)
    yield of_problem("vector-many", *half, 41, 2, 1, 1, 300, *dims, seq_lens=many)
    # As many heads as threadgroups: long sequences are one chunk each, which is dealt.
    yield of_problem("vector-dealt", *half, 3, 17, 17, 1, 1500, 8, 8, seq_lens=(1500, 20, 700))
    for block_size in (16, 1, 12, 64):
        yield of_problem(
            f"vector-paged-{block_size}", *paged, 2, 2, 1, 1, 192, *dims, seq_lens=(185, 37),
            block_size=block_size,
        )  # fmt: skip
    yield _hidden_nan()
    yield _hidden_chunk()
    yield _huge_sinks()
    yield of_problem(
        "vector-slices", *half, 3, 4, 2, 1, 1500, *dims, seq_lens=(1500, 0, 1333), sinks=True,
        change=partial(direct_launch.cut, largest_chunk=64, size=3),
    )  # fmt: skip


def other_vector() -> Iterator[Trial]:
    """One row and two of other dtypes; heads of which 16 and 32 lanes share a key."""
    yield of_problem("vector-one-row", "decode", f16, 2, 3, 3, 1, 300, 128, 128, seq_lens=(300, 9))
    yield of_problem("vector-256", "decode", bf16, 1, 2, 2, 2, 70, 256, 192, seq_lens=(67,), sinks=True)
    yield of_problem(
        "vector-f32", "decode", f32, 2, 2, 1, 1, 75, 136, 200, seq_lens=(75, 32), mask=torch.bool
    )
    yield of_problem("vector-f32-one-row", "decode", f32, 1, 2, 2, 1, 75, 72, 24, seq_lens=(75,))
    # Quantised: lanes past the end of a key and of a value, chunks narrower than 16 bytes, groups, of which a
    # simdgroup takes several steps.
    for kv_format, dims, length in (
        ("int8", (80, 72), 75),
        ("fp8_e4m3", (40, 80), 75),
        ("int4", (96, 160), 1290),
    ):
        yield of_problem(
            f"vector-{kv_format}", "decode", f16, 2, 4, 2, 1, length + 21, *dims, seq_lens=(length, 32),
            kv_format=kv_format,
        )  # fmt: skip
        yield of_problem(
            f"vector-paged-{kv_format}", "paged_decode", bf16, 2, 2, 2, 1, 96, *dims, seq_lens=(75, 32),
            block_size=16, window_left=40, kv_format=kv_format,
        )  # fmt: skip
    # One chain of 128 roundings would exceed the accuracy rule.
    yield of_problem("vector-f32-long-sums", "decode", f32, 1, 1, 1, 1, 60, 128, 16, scale=1.0)
    yield of_problem("vector-long-head", "decode", f16, 1, 2, 1, 1, 60, 16, 128, seq_lens=(60,))


def _hidden_nan() -> Trial:
    """One row does not see key 50. The values of keys 21, 40 and 67, which no row sees, are NaN
    or infinite."""
    mask = torch.zeros(1, 2, 1, 70)
    mask[..., [21, 40, 67]] = -torch.inf
    mask[:, 0, :, 50] = -torch.inf
    key, value = randn(f16, 1, 1, 70, 80), randn(f16, 1, 1, 70, 40)
    key[:, :, 21, ::3] = torch.nan
    value[:, :, [21, 67], ::3] = torch.nan
    value[:, :, 40, 1::2] = torch.inf
    return of_operands(
        "vector-hidden-nan", "decode", query=randn(f16, 1, 2, 1, 80), key=key, value=value, attn_mask=mask
    )


def _hidden_chunk() -> Trial:
    """In one launch, one row sees no key of a chunk whose values are infinite for the other row."""
    mask = torch.zeros(1, 2, 1, 256)
    mask[:, 0, :, 40:220] = -torch.inf
    value = randn(f16, 1, 1, 256, 40)
    value[:, :, 140, ::3] = torch.inf
    return of_operands(
        "vector-hidden-chunk", "decode",
        query=randn(f16, 1, 2, 1, 80), key=randn(f16, 1, 1, 256, 80), value=value, attn_mask=mask,
    )  # fmt: skip


def _huge_sinks() -> Trial:
    """As huge_sinks, with a head for each row."""
    largest = torch.finfo(torch.float32).max
    return of_operands(
        "vector-huge-sinks", "decode",
        query=randn(f16, 2, 6, 1, 64), key=randn(f16, 2, 6, 70, 64), value=randn(f16, 2, 6, 70, 32),
        sinks=torch.tensor([largest, -largest, 0.5, torch.inf, -torch.inf, -1.0]),
        alibi_slopes=torch.tensor([0.1, 0.1, largest, 0.1, 0.1, 0.1]),
        seq_lens=lengths(0, 70),
    )  # fmt: skip
