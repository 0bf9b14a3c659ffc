"""Attention of the newest rows over the keys that one rank holds.

`decode` places its rows at the last key it is given, which here is the rank's own last key. So every row
becomes a head with one row, which sees all keys of the rank; a mask hides those that the row's true position
hides, and ALiBi, whose distances are then all off by the same number, is put right in the sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..operators.attention import tree_bits
from ..operators.parts import shifted, with_sinks
from ..runtime.options import with_defaults
from .masks import biased, limited
from .shards import Shards, positions_of

__all__ = ["LocalKeys", "attend"]


@dataclass(frozen=True)
class LocalKeys:
    """What a rank holds of the keys: operands of `decode` or, with block_tables, of `paged_decode`."""

    op: str
    key: Tensor
    value: Tensor
    block_tables: Tensor | None
    capacity: int


def attend(
    query: Tensor, keys: LocalKeys, shards: Shards, rank: int, seq_lens: Tensor, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Returns out and sums for `merge_parts`. `seq_lens` counts the keys of all ranks."""
    every = {**with_defaults("decode", options)}
    for not_of_scores in ("seq_lens", "token_major_out"):
        every.pop(not_of_scores)
    batch, heads, rows, head_dim = query.shape
    positions = _padded(positions_of(shards, rank, query.device), keys.capacity, shards.length)
    lengths = seq_lens.long().clamp(0, shards.length)
    own = torch.searchsorted(positions, lengths).int()
    row_at = lengths[:, None] + torch.arange(-rows, 0, device=query.device)  # [B, Lq]

    visible = _visible(positions, lengths, row_at, every)
    mask = every.pop("attn_mask")
    slopes, distance = every.pop("alibi_slopes"), None
    if slopes is not None:
        last = torch.where(own > 0, positions[(own.long() - 1).clamp(min=0)], 0) if keys.capacity else lengths
        distance = slopes.float()[..., None] * (row_at - last[:, None])[:, None]  # [B, Hq, Lq]
        # A rank's keys may then be further apart than their indices. All ranks do alike: under an additive
        # mask, the sums of a part have other units.
        if any(len(runs) > 1 for runs in shards.runs):
            bias = slopes.float()[..., None, None] * (positions - last[:, None])[:, None, None]
            mask = biased(mask, bias)
            slopes = None
    if visible is not None:
        mask = limited(mask, visible)
    sinks = every.pop("sinks") if rank == 0 else None  # a sink counts once
    every |= {"sinks": None, "tree_mask": None, "window_left": -1, "window_right": -1, "sink_tokens": 0}

    if rows > 1:
        query = query.reshape(batch, heads * rows, 1, head_dim)
        if mask is not None:
            mask = mask.expand(batch, heads, rows, keys.capacity).reshape(
                batch, heads * rows, 1, keys.capacity
            )
        slopes = None if slopes is None else slopes.repeat_interleave(rows, -1)
    tables = () if keys.block_tables is None else (keys.block_tables,)
    part = getattr(torch.ops.fattn, keys.op).part
    out, sums = part(query, keys.key, keys.value, *tables, own, attn_mask=mask, alibi_slopes=slopes, **every)
    out, sums = (x.reshape(batch, heads, rows, x.shape[-1]) for x in (out, sums))
    if distance is not None:
        sums = shifted(sums, distance)
    return (out, sums) if sinks is None else with_sinks(out, sums, sinks)


def _padded(positions: Tensor, capacity: int, length: int) -> Tensor:
    """The position of each slot; of those that this rank does not use, the end of the sequence."""
    if positions.shape[0] >= capacity:
        return positions[:capacity]
    return torch.cat((positions, positions.new_full((capacity - positions.shape[0],), length)))


def _visible(positions: Tensor, lengths: Tensor, row_at: Tensor, options: dict[str, Any]) -> Tensor | None:
    """Which of the rank's keys each row sees by position, bool `[B, 1, Lq, capacity]`; None: all."""
    rows, window_left, tree_mask = row_at.shape[1], options["window_left"], options["tree_mask"]
    if rows == 1 and window_left < 0 and tree_mask is None:
        return None
    row = row_at[..., None]
    visible = positions <= row
    if window_left >= 0:
        in_window = positions >= row - min(window_left, 2**32)
        visible = visible & (in_window | (positions < options["sink_tokens"]))
    if tree_mask is not None:
        token = (positions - (lengths[:, None] - rows))[:, None]  # [B, 1, capacity]
        bits = tree_bits(tree_mask).expand(row_at.shape)[..., None] >> token.clamp(0, rows - 1)
        visible = visible & ((token < 0) | (bits & 1).bool())
    return visible[:, None]
