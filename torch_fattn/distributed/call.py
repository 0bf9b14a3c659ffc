"""A checked `prefill` call across ranks, and DTensor operands, whose placements define the shards."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from ..operators.visibility import Visibility
from ..runtime.signatures import shown
from ..runtime.tensor_checks import check_shape
from .exchange import Exchange, is_dtensor
from .local import MOST_CALLS, Scores, any_visible
from .shards import Run, Shards

SEQUENCE = 2  # the dimension of the positions


@dataclass(frozen=True)
class PrefillCall:
    exchange: Exchange
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    shards: Shards
    query_shards: Shards | None  # None: every rank has all rows
    q_offset: int
    row_runs: list[list[Run]]  # the absolute positions of the rows of each rank
    scores: Scores
    return_lse: bool

    @property
    def ranks(self) -> int:
        return self.shards.ranks

    @property
    def is_replicated(self) -> bool:
        return self.query_shards is None

    @property
    def rows(self) -> Shards:
        """The shards of the rows."""
        assert self.query_shards is not None
        return self.query_shards

    def row_count(self, rank: int) -> int:
        return sum(count for _, count in self.row_runs[rank])

    def columns_of(self, rank: int) -> Tensor | None:
        """The mask of this rank's rows over the keys of `rank`."""
        if self.mask is None or self.is_replicated or self.mask.dim() == 0 or self.mask.shape[-1] == 1:
            return self.mask
        return self.shards.take(self.mask, -1, rank)

    @property
    def has_row_mask(self) -> bool:
        """Whether the mask may differ between rows. With one row on a rank, a mask of its row looks like one
        for all rows."""
        may_be_one = 1 in map(self.row_count, range(self.ranks))
        return self.mask is not None and self.mask.dim() > 1 and (self.mask.shape[-2] != 1 or may_be_one)

    def needs(self, rank: int, source: int) -> bool:
        """Whether a row of `rank` sees a key of `source`."""
        visibility, keys = self.scores.visibility, self.shards.runs[source]
        return any(any_visible(row, run, visibility) for row in self.row_runs[rank] for run in keys)

    @cached_property
    def hops(self) -> tuple[int, ...]:
        """How many ranks each shard of keys must travel in the ring."""
        ranks = range(self.ranks)
        return tuple(
            max((n for n in ranks if self.needs((source + n) % self.ranks, source)), default=0)
            for source in ranks
        )


def prefill_call(
    exchange: Exchange,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    shards: Shards | None,
    query_shards: Shards | str,
    options: dict[str, Any],
    return_lse: bool,
) -> PrefillCall:
    """Checks a call. `options`: those of `prefill` without token_major_out."""
    name, rank, ranks = exchange.name, exchange.rank, exchange.ranks
    for what, operand in (("query", query), ("key", key), ("value", value)):
        check_shape(name, what, operand, ("batch", "heads", "length", "head_dim"))
    for what, keys in (("seq_lens", "filled"), ("block_mask", "visible")):
        if options.pop(what, None) is not None:
            raise NotImplementedError(
                f"{name}: {what} is not supported; pass an attn_mask of the {keys} keys"
            )
    placed = shards or Shards.sizes([key.shape[2]] * ranks)
    check_ranks(name, "shards", placed, ranks)
    check_count(name, "key", key.shape[2], "shards", placed, rank)
    rows: Shards | None = placed
    if isinstance(query_shards, Shards):
        rows = query_shards
    elif isinstance(query_shards, str) and query_shards == "replicated":
        rows = None
    elif not (isinstance(query_shards, str) and query_shards == "keys"):
        raise ValueError(
            f"{name}: query_shards is {shown(query_shards)}; pass 'keys', 'replicated' or Shards"
        )
    if rows is not None:
        check_ranks(name, "query_shards", rows, ranks)
        check_count(name, "query", query.shape[2], "query_shards", rows, rank)
    _check_with_operator(query, key, value, mask, rows, placed, options)

    length = query.shape[2] if rows is None else rows.length
    offset = options["q_offset"]
    offset = placed.length - length if offset is None else offset
    runs = [((0, query.shape[2]),)] * ranks if rows is None else rows.runs
    of_ranks = [[(offset + first, count) for first, count in of_rank] for of_rank in runs]
    scores = Scores(
        visibility=Visibility.of(options),
        sinks=options["sinks"],
        alibi_slopes=options["alibi_slopes"],
        pointwise={name: options[name] for name in ("softcap", "scale")},
        by_mask=max(map(len, of_ranks)) * max(map(len, placed.runs)) > MOST_CALLS,
    )
    return PrefillCall(exchange, query, key, value, mask, placed, rows, offset, of_ranks, scores, return_lse)


def check_ranks(name: str, what: str, shards: Shards, ranks: int) -> None:
    if shards.ranks != ranks:
        raise ValueError(
            f"{name}: {what} are for {shards.ranks} ranks and the group has {ranks}; make them for {ranks}"
        )


def check_count(name: str, what: str, length: int, which: str, shards: Shards, rank: int) -> None:
    if (own := shards.count(rank)) != length:
        raise ValueError(
            f"{name}: {what} has {length} positions and {which} give {own} to rank {rank}; pass those of "
            "this rank"
        )


def _check_with_operator(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    rows: Shards | None,
    shards: Shards,
    options: dict[str, Any],
) -> None:
    """Raises the operator's own errors. The mask of sharded rows has the columns of all keys."""
    if rows is not None and mask is not None:
        key, value = (
            operand.new_empty(*operand.shape[:2], 1, operand.shape[3]).expand(-1, -1, shards.length, -1)
            for operand in (key, value)
        )
    torch.ops.fattn._plan_prefill(query, key, value, **{**options, "attn_mask": mask, "mask_map": None})


@dataclass(frozen=True)
class LocalOperands:
    """The local operands of DTensors, and their shards."""

    operands: tuple[Tensor, Tensor, Tensor]
    mesh: Any
    shards: Shards
    query_shards: Shards | Literal["replicated"]
    query: Any

    def whole(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Results as DTensors with the placement of query."""
        from torch.distributed.tensor import DTensor

        rows = self.query.shape[SEQUENCE]

        def as_dtensor(local: Tensor) -> Tensor:
            sizes = [*local.shape[:SEQUENCE], rows, *local.shape[SEQUENCE + 1 :]]
            whole = local.new_empty(sizes, device="meta")
            known: dict[str, Any] = {"shape": whole.shape, "stride": whole.stride()}
            return DTensor.from_local(local, self.mesh, self.query.placements, run_check=False, **known)

        return as_dtensor(out), as_dtensor(lse)


def local_operands(name: str, query: Any, key: Any, value: Any, mask: Tensor | None) -> LocalOperands:
    """Unpacks DTensors. Raises unless query, key and value are on one mesh of one dimension, with key and
    value sharded over positions, and query sharded likewise or replicated."""
    from torch.distributed.tensor import Replicate, Shard

    operands = {"query": query, "key": key, "value": value}
    for what, operand in operands.items():
        if not is_dtensor(operand):
            raise TypeError(f"{name}: {what} is a plain tensor beside DTensors; pass all three as DTensors")
    if is_dtensor(mask):
        raise TypeError(f"{name}: attn_mask is a DTensor; pass this rank's part of it, attn_mask.to_local()")
    mesh = query.device_mesh
    for what, operand in operands.items():
        if operand.device_mesh != mesh or mesh.ndim != 1:
            raise ValueError(
                f"{name}: {what} is on {operand.device_mesh}; pass query, key and value on one mesh of one "
                "dimension"
            )
        allowed = (Shard(SEQUENCE), Replicate()) if what == "query" else (Shard(SEQUENCE),)
        if operand.placements[0] not in allowed:
            raise NotImplementedError(
                f"{name}: {what} is placed as {operand.placements[0]}; redistribute it to "
                f"{' or '.join(map(str, allowed))}"
            )
    shards = _chunks(key.shape[SEQUENCE], mesh.size())
    is_sharded = query.placements[0] == Shard(SEQUENCE)
    rows: Any = _chunks(query.shape[SEQUENCE], mesh.size()) if is_sharded else "replicated"
    local = (query.to_local(), key.to_local(), value.to_local())
    return LocalOperands(local, mesh, shards, rows, query)


def _chunks(length: int, ranks: int) -> Shards:
    """The shards of `torch.chunk`: all but the last ones are as long as the first."""
    most = -(-length // ranks)
    return Shards.sizes([min(max(length - rank * most, 0), most) for rank in range(ranks)])
