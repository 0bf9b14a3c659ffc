"""Attention of rows at given positions over keys at given positions, on one rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..operators.parts import added_parts
from .masks import biased, limited
from .shards import Run, positions_in

__all__ = ["Scores", "attend", "sees"]

# Up to this many pairs of a run of rows and a run of keys have a call each; more have calls under a mask.
MOST_CALLS = 8
# Entries of such a mask, which is made for some rows at a time.
MOST_ENTRIES = 2**26


@dataclass(frozen=True)
class Scores:
    """What a row sees, and what becomes of its scores: options of `prefill`."""

    is_causal: bool
    window_left: int
    window_right: int
    sink_tokens: int
    sinks: Tensor | None
    alibi_slopes: Tensor | None
    pointwise: dict[str, Any]  # softcap and scale
    by_mask: bool  # whether positions become a mask: for all ranks alike, as the units of sums depend on it

    @staticmethod
    def of(options: dict[str, Any], rows: Sequence[Sequence[Run]], keys: Sequence[Sequence[Run]]) -> Scores:
        """`rows` and `keys`: the runs of every rank."""
        return Scores(
            is_causal=options["is_causal"],
            window_left=options["window_left"],
            window_right=options["window_right"],
            sink_tokens=options["sink_tokens"],
            sinks=options["sinks"],
            alibi_slopes=options["alibi_slopes"],
            pointwise={name: options[name] for name in ("softcap", "scale")},
            by_mask=max(map(len, rows)) * max(map(len, keys)) > MOST_CALLS,
        )


def sees(rows: Run, keys: Run, scores: Scores) -> bool:
    """Whether any of the rows sees any of the keys."""
    (first_row, n_rows), (first_key, n_keys) = rows, keys
    if not n_rows or not n_keys or (scores.is_causal and first_key >= first_row + n_rows):
        return False
    if first_key < scores.sink_tokens:
        return True
    is_left = 0 <= scores.window_left < first_row - (first_key + n_keys - 1)
    is_right = 0 <= scores.window_right < first_key - (first_row + n_rows - 1)
    return not (is_left or is_right)


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
) -> tuple[Tensor, Tensor]:
    """Returns out and sums for `merge_parts`. `rows` and `keys` are the positions of the rows of query and of
    key; the mask has these rows and columns. `with_sinks`: whether the sinks count here."""
    sinks = scores.sinks if with_sinks else None
    done: list[tuple[Tensor, Tensor]] = []
    for own, row in _parts(rows):
        query_part, mask_part = query[:, :, own], _cut(mask, -2, own)
        if scores.by_mask:
            done += _under_mask(query_part, row, key, value, keys, mask_part, scores, sinks)
            continue
        seen = [(places, run) for places, run in _parts(keys) if sees(row, run, scores)]
        seen = seen or [(slice(0, 0), (0, 0))]  # for the sinks, and the sums of rows without keys
        parts = []
        for n, (places, run) in enumerate(seen):
            options = {
                "is_causal": scores.is_causal,
                "q_offset": row[0] - run[0],
                "window_left": scores.window_left,
                "window_right": scores.window_right,
                "sink_tokens": max(scores.sink_tokens - run[0], 0),
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
) -> Iterator[tuple[Tensor, Tensor]]:
    """The parts of consecutive rows, in which a mask hides what the positions hide."""
    device = query.device
    position = positions_in(keys).to(device)
    heads = 1 if scores.alibi_slopes is None else query.shape[0] * query.shape[1]
    step = max(MOST_ENTRIES // max(position.shape[0] * heads, 1), 1)
    for start in range(0, row[1], step):
        some = slice(start, min(start + step, row[1]))
        row_at = torch.arange(row[0] + some.start, row[0] + some.stop, device=device)[:, None]
        visible = _visible(position, row_at, scores)
        whole = _cut(mask, -2, some)
        if scores.alibi_slopes is not None:
            whole = biased(whole, scores.alibi_slopes.float()[..., None, None] * (position - row_at))
        whole = limited(whole, visible)
        options = {"sinks": sinks, "is_causal": False, "q_offset": 0, **scores.pointwise}
        yield _part(query[:, :, some], key, value, whole, options)


def _visible(position: Tensor, row_at: Tensor, scores: Scores) -> Tensor:
    """Bool `[rows, keys]`."""
    seen = torch.ones_like(position <= row_at)
    if scores.window_left >= 0:
        seen &= position >= row_at - min(scores.window_left, 2**32)
    if scores.window_right >= 0:
        seen &= position <= row_at + min(scores.window_right, 2**32)
    seen |= position < scores.sink_tokens
    return seen & (position <= row_at) if scores.is_causal else seen


def _part(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: Any) -> Any:
    return torch.ops.fattn.prefill.part(query, key, value, mask, **options)


def _parts(runs: Sequence[Run]) -> Iterator[tuple[slice, Run]]:
    """Each run, and where it is in the tensor of all."""
    begin = 0
    for run in runs:
        yield slice(begin, begin + run[1]), run
        begin += run[1]


def _cut(mask: Tensor | None, dim: int, places: slice) -> Tensor | None:
    if mask is None or mask.dim() < -dim or mask.shape[dim] == 1:
        return mask
    return mask[..., places] if dim == -1 else mask[..., places, :]
