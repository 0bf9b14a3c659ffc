"""The methods of a prefill across ranks: keys pass from rank to rank ("ring"), rows are gathered ("rows"), or
heads are exchanged for positions ("heads")."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..operators.parts import added_parts
from .call import PrefillCall
from .exchange import unpacked
from .local import Part, attend, joined, split


def attend_to(call: PrefillCall, key: Tensor, value: Tensor, source: int, *, with_sinks: bool) -> Part:
    """Attention of this rank's rows over the keys of rank `source`."""
    return attend(
        *(call.query, call.row_runs[call.exchange.rank], key, value, call.shards.runs[source]),
        *(call.columns_of(source), call.scores),
        with_sinks=with_sinks,
    )


def ring(calls: Sequence[PrefillCall]) -> list[Part]:
    """Ring attention for calls with one exchange, whose keys are sent together: out and sums of this rank's
    rows over the keys of all ranks. Attention to a shard overlaps the transfer of the next.

    In step s, rank r has the shard of rank r - s. A shard travels only to the last rank that sees it.
    """
    exchange = calls[0].exchange
    rank, ranks = exchange.rank, exchange.ranks
    hops = [max(call.hops[source] for call in calls) for source in range(ranks)]
    own = [operand.reshape(-1) for call in calls for operand in (call.key, call.value)]
    present = exchange.on_wire(torch.cat(own)) if hops[rank] else None
    parts: list[Part] = []
    for step in range(ranks):
        source, following = (rank - step) % ranks, (rank - step - 1) % ranks
        leaving = present if hops[source] > step else None
        arriving = sum(_numel(call, following) for call in calls) if hops[following] > step else 0
        transfer = exchange.shift(leaving, arriving, calls[0].key)
        if step == 0:
            parts = [attend_to(call, call.key, call.value, source, with_sinks=True) for call in calls]
        elif present is not None:
            parts = _added(calls, parts, present, source)
        present = transfer.wait()
    return parts


def _added(calls: Sequence[PrefillCall], parts: list[Part], shard: Tensor, source: int) -> list[Part]:
    """Adds attention over the shard of rank `source` to the parts."""
    flats = shard.split([_numel(call, source) for call in calls])
    added = []
    for call, part, flat in zip(calls, parts, flats, strict=True):
        if call.needs(call.exchange.rank, source):
            key, value = unpacked(flat.to(call.key.device), _shapes(call, source))
            part = added_parts([part, attend_to(call, key, value, source, with_sinks=False)])
        added.append(part)
    return added


def _shapes(call: PrefillCall, rank: int) -> list[torch.Size]:
    """The shapes of a rank's keys and values."""
    count = call.shards.count(rank)
    return [torch.Size((*x.shape[:2], count, x.shape[3])) for x in (call.key, call.value)]


def _numel(call: PrefillCall, rank: int) -> int:
    return sum(shape.numel() for shape in _shapes(call, rank))


def gather_rows(call: PrefillCall) -> Part:
    """Every rank attends to its keys with the rows of all ranks, and sends each rank the partial results of
    its rows. Pays off for few rows over many keys."""
    exchange, shards = call.exchange, call.shards
    counts = [call.row_count(rank) for rank in range(exchange.ranks)]
    parts = []
    for rank, rows in enumerate(exchange.gather_rows(call.query, 2, counts)):
        part = attend(
            *(rows, call.row_runs[rank], call.key, call.value, shards.runs[exchange.rank]),
            *(call.mask, call.scores),
            with_sinks=exchange.rank == 0,
        )
        parts.append(joined(part))
    own = list(parts[exchange.rank].shape)
    returned = exchange.all_to_all(parts, [own] * exchange.ranks)
    return added_parts([split(part) for part in returned])


def exchange_heads(call: PrefillCall, return_lse: bool) -> tuple[Tensor, Tensor]:
    """DeepSpeed Ulysses: one all-to-all gives each rank all positions of some heads; another returns the
    results. Returns out and lse of this rank's rows; without return_lse, lse has no rows."""
    exchange, scores = call.exchange, call.scores
    query, key, value = _all_positions(call)
    heads = query.shape[1]
    own = slice(exchange.rank * heads, (exchange.rank + 1) * heads)
    mask = call.mask
    if mask is not None and mask.dim() > 2 and mask.shape[-3] != 1:
        mask = mask[..., own, :, :]
    out, lse = torch.ops.fattn.prefill(
        *(query, key, value, mask),
        q_offset=call.q_offset,
        sinks=None if scores.sinks is None else scores.sinks[own],
        alibi_slopes=None if scores.alibi_slopes is None else scores.alibi_slopes[..., own],
        **scores.visibility._asdict(),
        **scores.pointwise,
    )
    return _own_rows(call, out), _own_rows(call, lse) if return_lse else lse[:, :, :0]


def _all_positions(call: PrefillCall) -> list[Tensor]:
    """Query, key and value of this rank's heads, at all positions."""
    ranks = range(call.ranks)
    operands = ((call.query, call.rows), (call.key, call.shards), (call.value, call.shards))
    shares = [operand.chunk(call.ranks, 1) for operand, _ in operands]
    leaving = [torch.cat([share[rank].reshape(-1) for share in shares]) for rank in ranks]
    shapes = [
        [
            torch.Size((*share[0].shape[:2], shards.count(rank), share[0].shape[3]))
            for share, (_, shards) in zip(shares, operands, strict=True)
        ]
        for rank in ranks
    ]
    arrived = call.exchange.all_to_all(leaving, [[sum(s.numel() for s in of_rank)] for of_rank in shapes])
    pieces = [unpacked(flat, of_rank) for flat, of_rank in zip(arrived, shapes, strict=True)]
    return [shards.join([of_rank[n] for of_rank in pieces], 2) for n, (_, shards) in enumerate(operands)]


def _own_rows(call: PrefillCall, result: Tensor) -> Tensor:
    """Converts a result of all rows and this rank's heads to this rank's rows and all heads."""
    exchange, rows = call.exchange, call.rows
    leaving = [rows.take(result, 2, rank) for rank in range(exchange.ranks)]
    arrived = exchange.all_to_all(leaving, [leaving[exchange.rank].shape] * exchange.ranks)
    return torch.cat(arrived, 1)
