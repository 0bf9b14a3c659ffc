"""Attention of rows at given positions over the keys that one rank holds, as a part that `merge_parts` merges
with those of the other ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..operators.parts import added_parts, merge_parts, shifted, with_sinks
from ..operators.prefix_and_suffix import Keys
from ..operators.visibility import Visibility, biased, limited, tree_sees
from ..runtime.options import with_defaults
from .exchange import Exchange
from .shards import Run, Shards, positions_in, positions_of

__all__ = [
    "SUMS",
    "Part",
    "Scores",
    "attend",
    "attend_newest",
    "joined",
    "merge_ranks",
    "sees",
    "split",
]

Part = tuple[Tensor, Tensor]  # out and sums, as `merge_parts` takes them
SUMS = 4  # numbers of a row beside its columns
# Up to this many pairs of a run of rows and a run of keys have a call each; more have calls under a mask.
MOST_CALLS = 8
# Entries of such a mask, which is made for some rows at a time.
MOST_ENTRIES = 2**26


@dataclass(frozen=True)
class Scores:
    """What a row sees, and what becomes of its scores: options of `prefill`."""

    seen: Visibility
    sinks: Tensor | None
    alibi_slopes: Tensor | None
    pointwise: dict[str, Any]  # softcap and scale
    by_mask: bool  # whether positions become a mask: for all ranks alike, as the units of sums depend on it

    @staticmethod
    def of(options: dict[str, Any], rows: Sequence[Sequence[Run]], keys: Sequence[Sequence[Run]]) -> Scores:
        """`rows` and `keys`: the runs of every rank."""
        return Scores(
            seen=Visibility.of(options),
            sinks=options["sinks"],
            alibi_slopes=options["alibi_slopes"],
            pointwise={name: options[name] for name in ("softcap", "scale")},
            by_mask=max(map(len, rows)) * max(map(len, keys)) > MOST_CALLS,
        )


def sees(rows: Run, keys: Run, seen: Visibility) -> bool:
    """Whether any of the rows sees any of the keys."""
    (first_row, n_rows), (first_key, n_keys) = rows, keys
    if not n_rows or not n_keys:
        return False
    last_row = first_row + n_rows - 1
    begin, end = seen.window(first_row)[0], seen.window(last_row)[1]
    return first_key < seen.sinks(last_row) or begin - n_keys < first_key < end


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
    """`rows` and `keys` are the positions of the rows of query and of key; the mask has these rows and
    columns. `with_sinks`: whether the sinks count here."""
    sinks = scores.sinks if with_sinks else None
    done: list[Part] = []
    for own, row in _places(rows):
        query_part, mask_part = query[:, :, own], _cut(mask, -2, own)
        if scores.by_mask:
            done += _under_mask(query_part, row, key, value, keys, mask_part, scores, sinks)
            continue
        seen = [(places, run) for places, run in _places(keys) if sees(row, run, scores.seen)]
        seen = seen or [(slice(0, 0), (0, 0))]  # for the sinks, and the sums of rows without keys
        parts = []
        for n, (places, run) in enumerate(seen):
            options = {
                **scores.seen._asdict(),
                "q_offset": row[0] - run[0],
                "sink_tokens": max(scores.seen.sink_tokens - run[0], 0),
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
    """The parts of consecutive rows, in which a mask hides what the positions hide."""
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
        whole = limited(whole, scores.seen.sees(row_at, position))
        options = {"sinks": sinks, "is_causal": False, "q_offset": 0, **scores.pointwise}
        yield _part(query[:, :, some], key, value, whole, options)


def _part(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: Any) -> Any:
    return torch.ops.fattn.prefill.part(query, key, value, mask, **options)


def _places(runs: Sequence[Run]) -> Iterator[tuple[slice, Run]]:
    """Each run, and where it is in the tensor of all."""
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
    """`keys` are those of this rank; `seq_lens` counts those of all ranks.

    `decode` places its rows at the last key it is given, which here is the rank's own last key. So every row
    becomes a head with one row, which sees all keys of the rank; a mask hides those that the row's true
    position hides, and ALiBi, whose distances are then all off by the same number, is put right in the sums.
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
        # A rank's keys may then be further apart than their indices. All ranks do alike: under an additive
        # mask, the sums of a part have other units.
        if any(len(runs) > 1 for runs in shards.runs):
            bias = slopes.float()[..., None, None] * (positions - last[:, None])[:, None, None]
            mask = biased(mask, bias)
            slopes = None
    if rows > 1 or every["window_left"] >= 0 or tree_mask is not None:
        visible = Visibility.of(every).sees(row_at[..., None], positions)
        if tree_mask is not None:
            visible = visible & tree_sees(tree_mask, positions - (lengths[:, None] - rows))
        mask = limited(mask, visible[:, None])
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
    """The position of each slot; of those that this rank does not use, the end of the sequence."""
    if positions.shape[0] >= capacity:
        return positions[:capacity]
    return torch.cat((positions, positions.new_full((capacity - positions.shape[0],), length)))


# ---- parts of several ranks, in which the columns and the sums of a row travel side by side


def joined(part: Part) -> Tensor:
    return torch.cat(part, -1)


def split(part: Tensor) -> Part:
    """Undoes `joined`."""
    return part[..., :-SUMS], part[..., -SUMS:]


def merge_ranks(exchange: Exchange, part: Part, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Out and lse of the parts of all ranks, merged in the order of the ranks: bit-identical on each."""
    if exchange.ranks == 1:
        return merge_parts([part[0]], [part[1]], dtype)
    outs, sums = split(exchange.gather(joined(part)))
    return merge_parts(list(outs), list(sums), dtype)
