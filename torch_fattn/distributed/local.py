"""Attention of rows at given positions over one rank's keys, as a part for `merge_parts`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..operators.parts import added_parts, merge_parts, shifted, with_sinks
from ..operators.prefix_and_suffix import Keys
from ..operators.visibility import Visibility, biased, masked, tree_visible
from ..runtime.options import with_defaults
from .exchange import Exchange
from .shards import Run, Shards, positions_in, positions_of

Part = tuple[Tensor, Tensor]  # out and sums of `merge_parts`
SUMS = 4  # numbers of a row beside its columns
# Up to this many pairs of a row run and a key run take one call each; more use masks.
MOST_CALLS = 8
# Entries of such a mask, which covers some of the rows at a time.
MOST_ENTRIES = 2**26


@dataclass(frozen=True)
class Scores:
    """The options of `prefill` that hide keys or change scores."""

    visibility: Visibility
    sinks: Tensor | None
    alibi_slopes: Tensor | None
    pointwise: dict[str, Any]  # softcap and scale
    by_mask: bool  # whether positions become a mask; equal on all ranks, since the units of sums depend on it


def any_visible(rows: Run, keys: Run, visibility: Visibility) -> bool:
    """Whether any of the rows sees any of the keys."""
    (first_row, n_rows), (first_key, n_keys) = rows, keys
    if not n_rows or not n_keys:
        return False
    last_row = first_row + n_rows - 1
    begin, end = visibility.window(first_row)[0], visibility.window(last_row)[1]
    return first_key < visibility.sinks(last_row) or begin - n_keys < first_key < end


def attend(
    query: Tensor,
    rows: Sequence[Run],
    key: Tensor,
    value: Tensor,
    keys: Sequence[Run],
    mask: Tensor | None,
    scores: Scores,
    *,
    with_sinks: bool,
) -> Part:
    """Attention over one rank's keys. `rows` and `keys` are the positions of query and key; the mask has
    these rows and columns. `with_sinks`: whether to count the sinks here."""
    sinks = scores.sinks if with_sinks else None
    done: list[Part] = []
    for own, row in _slices(rows):
        query_part, mask_part = query[:, :, own], _cut(mask, -2, own)
        if scores.by_mask:
            done += _under_mask(query_part, row, key, value, keys, mask_part, scores, sinks)
            continue
        seen = [(places, run) for places, run in _slices(keys) if any_visible(row, run, scores.visibility)]
        seen = seen or [(slice(0, 0), (0, 0))]  # for the sinks, and the sums of rows without keys
        parts = []
        for n, (places, run) in enumerate(seen):
            options = {
                **scores.visibility._asdict(),
                "q_offset": row[0] - run[0],
                "sink_tokens": max(scores.visibility.sink_tokens - run[0], 0),
                "alibi_slopes": scores.alibi_slopes,
                "sinks": sinks if n == 0 else None,
                **scores.pointwise,
            }
            own_mask = _cut(mask_part, -1, places)
            parts.append(_part(query_part, key[:, :, places], value[:, :, places], own_mask, options))
        done.append(added_parts(parts))
    if not done:
        done = [_part(query, key[:, :, :0], value[:, :, :0], None, scores.pointwise)]
    outs, sums = zip(*done, strict=True)
    return (torch.cat(outs, 2), torch.cat(sums, 2)) if len(done) > 1 else done[0]


def _under_mask(
    query: Tensor,
    row: Run,
    key: Tensor,
    value: Tensor,
    keys: Sequence[Run],
    mask: Tensor | None,
    scores: Scores,
    sinks: Tensor | None,
) -> Iterator[Part]:
    """Parts of consecutive rows. A mask hides the keys that positions hide."""
    device = query.device
    position = positions_in(keys).to(device)
    heads = 1 if scores.alibi_slopes is None else query.shape[0] * query.shape[1]
    step = max(MOST_ENTRIES // max(position.shape[0] * heads, 1), 1)
    for start in range(0, row[1], step):
        some = slice(start, min(start + step, row[1]))
        row_at = torch.arange(row[0] + some.start, row[0] + some.stop, device=device)[:, None]
        whole = _cut(mask, -2, some)
        if scores.alibi_slopes is not None:
            whole = biased(whole, scores.alibi_slopes.float()[..., None, None] * (position - row_at))
        whole = masked(whole, scores.visibility.mask(row_at, position))
        options = {"sinks": sinks, "is_causal": False, "q_offset": 0, **scores.pointwise}
        yield _part(query[:, :, some], key, value, whole, options)


def _part(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: Any) -> Any:
    return torch.ops.fattn.prefill.part(query, key, value, mask, **options)


def _slices(runs: Sequence[Run]) -> Iterator[tuple[slice, Run]]:
    """Each run, and its slice of the joined tensor."""
    begin = 0
    for run in runs:
        yield slice(begin, begin + run[1]), run
        begin += run[1]


def _cut(mask: Tensor | None, dim: int, places: slice) -> Tensor | None:
    if mask is None or mask.dim() < -dim or mask.shape[dim] == 1:
        return mask
    return mask[..., places] if dim == -1 else mask[..., places, :]


# ---- the newest rows


def attend_newest(
    query: Tensor, keys: Keys, shards: Shards, rank: int, seq_lens: Tensor, options: dict[str, Any]
) -> Part:
    """Attention of the newest rows over this rank's `keys`; `seq_lens` counts keys on all ranks.

    `decode` aligns its rows to the last key it is given, here the rank's last key. So every row becomes a
    head of one row that sees all keys of the rank. A mask hides the keys that the row's true position hides,
    and the sums are corrected for ALiBi, whose distances are all off by the same number.
    """
    every = {**with_defaults("decode", options)}
    for not_of_scores in ("seq_lens", "token_major_out"):
        every.pop(not_of_scores)
    batch, heads, rows, head_dim = query.shape
    positions = _padded(positions_of(shards, rank, query.device), keys.length, shards.length)
    lengths = seq_lens.long().clamp(0, shards.length)
    own = torch.searchsorted(positions, lengths).int()
    row_at = lengths[:, None] + torch.arange(-rows, 0, device=query.device)  # [B, Lq]

    mask, tree_mask = every.pop("attn_mask"), every["tree_mask"]
    slopes, distance = every.pop("alibi_slopes"), None
    if slopes is not None:
        last = torch.where(own > 0, positions[(own.long() - 1).clamp(min=0)], 0) if keys.length else lengths
        distance = slopes.float()[..., None] * (row_at - last[:, None])[:, None]  # [B, Hq, Lq]
        # A rank's keys may then be further apart than their indices. All ranks must agree: under an additive
        # mask, the sums of a part have other units.
        if any(len(runs) > 1 for runs in shards.runs):
            bias = slopes.float()[..., None, None] * (positions - last[:, None])[:, None, None]
            mask = biased(mask, bias)
            slopes = None
    if rows > 1 or every["window_left"] >= 0 or tree_mask is not None:
        visible = Visibility.of(every).mask(row_at[..., None], positions)
        if tree_mask is not None:
            visible = visible & tree_visible(tree_mask, positions - (lengths[:, None] - rows))
        mask = masked(mask, visible[:, None])
    sinks = every.pop("sinks") if rank == 0 else None  # a sink counts once
    every |= {"sinks": None, "tree_mask": None, "window_left": -1, "window_right": -1, "sink_tokens": 0}

    if rows > 1:
        query = query.reshape(batch, heads * rows, 1, head_dim)
        if mask is not None:
            mask = mask.expand(batch, heads, rows, keys.length).reshape(batch, heads * rows, 1, keys.length)
        slopes = None if slopes is None else slopes.repeat_interleave(rows, -1)
    out, sums = replace(keys, seq_lens=own).decode(query, attn_mask=mask, alibi_slopes=slopes, **every)
    out, sums = (x.reshape(batch, heads, rows, x.shape[-1]) for x in (out, sums))
    if distance is not None:
        sums = shifted(sums, distance)
    return (out, sums) if sinks is None else with_sinks(out, sums, sinks)


def _padded(positions: Tensor, capacity: int, length: int) -> Tensor:
    """The position of each slot; for unused slots, the end of the sequence."""
    if positions.shape[0] >= capacity:
        return positions[:capacity]
    return torch.cat((positions, positions.new_full((capacity - positions.shape[0],), length)))


# ---- parts of several ranks; the columns and sums of a row are sent side by side


def joined(part: Part) -> Tensor:
    return torch.cat(part, -1)


def split(part: Tensor) -> Part:
    """Undoes `joined`."""
    return part[..., :-SUMS], part[..., -SUMS:]


def merge_ranks(exchange: Exchange, part: Part, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Merges the parts of all ranks, in rank order, into out and lse: bit-identical on every rank."""
    if exchange.ranks == 1:
        return merge_parts([part[0]], [part[1]], dtype)
    outs, sums = split(exchange.gather(joined(part)))
    return merge_parts(list(outs), list(sums), dtype)
