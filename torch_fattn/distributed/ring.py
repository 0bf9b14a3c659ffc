"""Ring attention: the keys of all ranks pass every rank that sees them, the next ones while the present ones
are attended to."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..operators.parts import added_parts
from .call import PrefillCall
from .local_prefill import attend
from .parts import Part

__all__ = ["ring"]


def ring(calls: Sequence[PrefillCall]) -> list[Part]:
    """Returns out and sums of this rank's rows over the keys of all ranks, for calls with one exchange whose
    keys travel together.

    In step s a rank has the shard of the rank s before it. A shard goes on only as far as the last rank that
    sees it.
    """
    exchange = calls[0].exchange
    rank, ranks = exchange.rank, exchange.ranks
    hops = [max(call.sizes.hops[source] for call in calls) for source in range(ranks)]
    own = [operand.reshape(-1) for call in calls for operand in (call.key, call.value)]
    present = exchange.on_wire(torch.cat(own)) if hops[rank] else None
    parts: list[Part] = []
    for step in range(ranks):
        source, following = (rank - step) % ranks, (rank - step - 1) % ranks
        leaving = present if hops[source] > step else None
        arriving = _numel(calls, following) if hops[following] > step else 0
        transfer = exchange.shift(leaving, arriving, calls[0].key)
        if step == 0:
            parts = [_attend(call, call.key, call.value, source, with_sinks=True) for call in calls]
        elif present is not None:
            parts = _added(calls, parts, present, source)
        present = transfer.wait()
    return parts


def _added(calls: Sequence[PrefillCall], parts: list[Part], shard: Tensor, source: int) -> list[Part]:
    """The parts, and those over the shard of that rank."""
    rank = calls[0].exchange.rank
    sizes = [_numel([call], source) for call in calls]
    added = []
    for call, part, flat in zip(calls, parts, shard.split(sizes), strict=True):
        if call.sizes.needs(rank, source):
            key, value = _operands(call, flat.to(call.key.device), source)
            part = added_parts([part, _attend(call, key, value, source, with_sinks=False)])
        added.append(part)
    return added


def _attend(call: PrefillCall, key: Tensor, value: Tensor, source: int, *, with_sinks: bool) -> Part:
    return attend(
        *(call.query, call.rows_of(call.exchange.rank), key, value, call.shards.runs[source]),
        *(call.columns_of(source), call.scores),
        with_sinks=with_sinks,
    )


def _numel(calls: Sequence[PrefillCall], rank: int) -> int:
    """The numbers in the keys and values of a rank."""

    def columns(call: PrefillCall) -> int:
        return call.key.shape[0] * call.key.shape[1] * (call.key.shape[3] + call.value.shape[3])

    return sum(call.shards.count(rank) * columns(call) for call in calls)


def _operands(call: PrefillCall, flat: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    batch, heads, _, head_dim = call.key.shape
    rows = call.shards.count(rank)
    key, value = flat.split((batch * heads * rows * head_dim, batch * heads * rows * call.value.shape[3]))
    return key.view(batch, heads, rows, head_dim), value.view(batch, heads, rows, call.value.shape[3])
