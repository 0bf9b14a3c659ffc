"""Which method a prefill across ranks takes: the one whose busiest rank sends the fewest bytes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from ..runtime.signatures import shown
from .exchange import HEADER_BYTES
from .local import SUMS, Scores, sees
from .shards import Run

__all__ = ["METHODS", "Method", "Plan", "Sizes", "chosen_method", "plan_of", "work_of"]

Method = Literal["auto", "ring", "rows", "heads"]
METHODS = ("auto", "ring", "rows", "heads")

FLOAT = 4  # bytes of a number of a partial result


@dataclass(frozen=True)
class Sizes:
    """The sizes of a call, the same on every rank."""

    batch: int
    q_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    itemsize: int
    rows: tuple[tuple[Run, ...], ...]  # absolute positions of the rows of each rank
    keys: tuple[tuple[Run, ...], ...]
    scores: Scores
    has_mask: bool = False
    has_row_mask: bool = False  # the mask may differ between rows
    is_replicated: bool = False  # every rank has the same rows
    return_lse: bool = False

    @property
    def ranks(self) -> int:
        return len(self.keys)

    def row_count(self, rank: int) -> int:
        return sum(count for _, count in self.rows[rank])

    def key_count(self, rank: int) -> int:
        return sum(count for _, count in self.keys[rank])

    @property
    def row_bytes(self) -> int:
        """A query row of all heads."""
        return self.batch * self.q_heads * self.head_dim * self.itemsize

    @property
    def out_bytes(self) -> int:
        """A row of the result."""
        return self.batch * self.q_heads * self.value_dim * self.itemsize

    @property
    def part_bytes(self) -> int:
        """A row of a partial result: out and the sums of the softmax, in float32."""
        return self.batch * self.q_heads * (self.value_dim + SUMS) * FLOAT

    @property
    def key_bytes(self) -> int:
        """A position of key and value."""
        return self.batch * self.kv_heads * (self.head_dim + self.value_dim) * self.itemsize

    def needs(self, rank: int, source: int) -> bool:
        """Whether a row of `rank` sees a key of `source`."""
        return any(sees(row, run, self.scores.seen) for row in self.rows[rank] for run in self.keys[source])

    @cached_property
    def hops(self) -> tuple[int, ...]:
        """How many ranks further each shard of keys must go in a ring."""
        ranks = range(self.ranks)
        return tuple(
            max((n for n in ranks if self.needs((source + n) % self.ranks, source)), default=0)
            for source in ranks
        )


@dataclass(frozen=True)
class Plan:
    """The method of a call, and what each method costs."""

    method: str
    sent: dict[str, tuple[int, ...]]  # bytes that each rank sends, by method
    memory: dict[str, tuple[int, ...]]  # bytes of each rank beside its operands, by method
    why_not: dict[str, str]  # methods that do not fit


def plan_of(sizes: Sizes) -> Plan:
    if sizes.is_replicated:
        ways = {"parts": _parts(sizes)}
        why_not = dict.fromkeys(METHODS[1:], "every rank has all rows")
    else:
        ways = {"ring": _ring(sizes), "rows": _rows(sizes), "heads": _heads(sizes)}
        why_not = _refusals(sizes)
    header = HEADER_BYTES * (sizes.ranks - 1)
    sent = {name: tuple(header + each for each, _ in costs) for name, costs in ways.items()}
    memory = {name: tuple(each for _, each in costs) for name, costs in ways.items()}
    fitting = [name for name in ways if name not in why_not]
    return Plan(min(fitting, key=lambda name: max(sent[name])), sent, memory, why_not)


def chosen_method(name: str, plan: Plan, method: str) -> str:
    """Raises for a method that is not one, or does not fit."""
    if not isinstance(method, str) or method not in METHODS:
        raise ValueError(f"{name}: method is {shown(method)}; use one of {', '.join(map(repr, METHODS))}")
    if method == "auto":
        return plan.method
    if why := plan.why_not.get(method):
        raise NotImplementedError(f"{name}: method {method!r} does not fit: {why}; use method='auto'")
    return method


def _refusals(sizes: Sizes) -> dict[str, str]:
    refusals = {}
    for heads, kind in ((sizes.kv_heads, "key-value heads"), (sizes.q_heads, "query heads")):
        if heads % sizes.ranks:
            refusals["heads"] = f"{heads} {kind} do not divide among {sizes.ranks} ranks"
    if sizes.has_row_mask:
        refusals["heads"] = "the attn_mask may differ between rows, and each rank has its own rows of it"
    if sizes.has_mask:
        refusals["rows"] = "an attn_mask is that of each rank's own rows"
    return refusals


Costs = list[tuple[int, int]]  # of each rank: bytes sent, and bytes of memory beside the operands


def _parts(sizes: Sizes) -> Costs:
    part = sizes.row_count(0) * sizes.part_bytes
    return [((sizes.ranks - 1) * part, (sizes.ranks + 1) * part)] * sizes.ranks


def _ring(sizes: Sizes) -> Costs:
    ranks, hops = sizes.ranks, sizes.hops
    costs = []
    for rank in range(ranks):
        shards = [sizes.key_count((rank - step) % ranks) * sizes.key_bytes for step in range(ranks)]
        passed = [shard for step, shard in enumerate(shards) if hops[(rank - step) % ranks] > step]
        part = sizes.row_count(rank) * sizes.part_bytes
        most = max(shards)  # one leaves while the other arrives
        costs.append((sum(passed), 2 * most + 4 * part))
    return costs


def _rows(sizes: Sizes) -> Costs:
    ranks = sizes.ranks
    counts = [sizes.row_count(rank) for rank in range(ranks)]
    gathered = max(counts) * sizes.row_bytes
    costs = []
    for count in counts:
        returned = (sum(counts) - count) * sizes.part_bytes
        memory = (ranks + 1) * gathered + 2 * (sum(counts) + ranks * count) * sizes.part_bytes
        costs.append(((ranks - 1) * gathered + returned, memory))
    return costs


def _heads(sizes: Sizes) -> Costs:
    ranks = sizes.ranks
    all_rows = sum(sizes.row_count(rank) for rank in range(ranks))
    all_keys = sum(sizes.key_count(rank) for rank in range(ranks))
    lse_bytes = sizes.batch * sizes.q_heads * FLOAT if sizes.return_lse else 0
    costs = []
    for rank in range(ranks):
        rows, keys = sizes.row_count(rank), sizes.key_count(rank)
        operands = (rows * sizes.row_bytes + keys * sizes.key_bytes) * (ranks - 1) // ranks
        results = (all_rows - rows) * (sizes.out_bytes + lse_bytes) // ranks
        whole = (all_rows * (sizes.row_bytes + sizes.out_bytes) + all_keys * sizes.key_bytes) // ranks
        costs.append((operands + results, 2 * whole))
    return costs


def work_of(sizes: Sizes) -> tuple[float, ...]:
    """Each rank's share of the scores that are not hidden by position."""
    pairs = sizes.scores.seen.pairs
    every = ((0, sum(map(sizes.key_count, range(sizes.ranks)))),)
    scores = [
        sum(
            pairs(first, rows, key + keys) - pairs(first, rows, key)
            for first, rows in sizes.rows[rank]
            for key, keys in (sizes.keys[rank] if sizes.is_replicated else every)
        )
        for rank in range(sizes.ranks)
    ]
    return tuple(count / max(sum(scores), 1) for count in scores)
