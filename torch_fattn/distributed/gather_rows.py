"""Rows travel in place of keys: every rank attends to its keys with the rows of all ranks, and sends each
rank the partial results of its rows. It pays where rows are few and keys many."""

from __future__ import annotations

from ..operators.parts import added_parts
from .call import PrefillCall
from .local_prefill import attend
from .parts import Part, joined, split

__all__ = ["gather_rows"]


def gather_rows(call: PrefillCall) -> Part:
    """Returns out and sums of this rank's rows over the keys of all ranks."""
    exchange, shards = call.exchange, call.shards
    counts = [call.sizes.row_count(rank) for rank in range(exchange.ranks)]
    parts = []
    for rank, rows in enumerate(exchange.gather_rows(call.query, 2, counts)):
        part = attend(
            *(rows, call.rows_of(rank), call.key, call.value, shards.runs[exchange.rank]),
            *(call.mask, call.scores),
            with_sinks=exchange.rank == 0,
        )
        parts.append(joined(part))
    own = list(parts[exchange.rank].shape)
    returned = exchange.all_to_all(parts, [own] * exchange.ranks)
    return added_parts([split(part) for part in returned])
