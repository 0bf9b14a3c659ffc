"""Ring attention: the keys of all ranks pass every rank that sees them, the next ones while the present ones
are attended to."""

from __future__ import annotations

from torch import Tensor

import torch

from ..operators.parts import added_parts
from .call import PrefillCall
from .local_prefill import attend

__all__ = ["ring"]


def ring(call: PrefillCall) -> tuple[Tensor, Tensor]:
    """Returns out and sums of this rank's rows over the keys of all ranks.

    In step s a rank has the shard of the rank s before it. A shard goes on only as far as the last rank that
    sees it.
    """
    exchange, sizes = call.exchange, call.sizes
    rank, ranks = exchange.rank, exchange.ranks
    shape_of = _Shapes(call)
    key, value = call.key, call.value
    present = exchange.on_wire(torch.cat((key.reshape(-1), value.reshape(-1)))) if sizes.hops[rank] else None
    parts: list[tuple[Tensor, Tensor]] = []
    for step in range(ranks):
        source, following = (rank - step) % ranks, (rank - step - 1) % ranks
        leaving = present if sizes.hops[source] > step else None
        arriving = shape_of.numel(following) if sizes.hops[following] > step else 0
        transfer = exchange.shift(leaving, arriving, key)
        if step == 0 or (present is not None and sizes.needs(rank, source)):
            if step:
                key, value = shape_of.apart(present, source)
            part = attend(
                *(call.query, call.rows_of(rank), key, value, call.shards.runs[source]),
                *(call.columns_of(source), call.scores),
                with_sinks=step == 0,
            )
            parts = [added_parts([*parts, part])]
        present = transfer.wait()
    return parts[0]


class _Shapes:
    """The shapes of the keys and values of each rank, which travel as one tensor."""

    def __init__(self, call: PrefillCall) -> None:
        self.call = call

    def numel(self, rank: int) -> int:
        key, value = self.call.key, self.call.value
        return key.shape[0] * key.shape[1] * self.call.shards.count(rank) * (key.shape[3] + value.shape[3])

    def apart(self, both: Tensor | None, rank: int) -> tuple[Tensor, Tensor]:
        assert both is not None
        key, value = self.call.key, self.call.value
        count = self.call.shards.count(rank)
        both = both.to(key.device)
        of_key = key.shape[0] * key.shape[1] * count * key.shape[3]
        return (
            both[:of_key].view(*key.shape[:2], count, key.shape[3]),
            both[of_key:].view(*key.shape[:2], count, value.shape[3]),
        )
