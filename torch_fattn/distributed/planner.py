"""Chooses the method of a prefill across ranks: the one whose busiest rank sends the fewest bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..runtime.signatures import shown
from .call import PrefillCall
from .exchange import HEADER_BYTES
from .local import SUMS

Method = Literal["auto", "ring", "rows", "heads"]
METHODS = ("auto", "ring", "rows", "heads")

FLOAT = 4  # bytes of a float32


@dataclass(frozen=True)
class Plan:
    """The method of a call, and what each method costs."""

    method: str
    sent: dict[str, tuple[int, ...]]  # bytes that each rank sends, by method
    memory: dict[str, tuple[int, ...]]  # bytes of each rank beside its operands, by method
    why_not: dict[str, str]  # methods that cannot run the call


def plan_of(call: PrefillCall) -> Plan:
    if call.is_replicated:
        ways = {"parts": _parts(call)}
        why_not = dict.fromkeys(METHODS[1:], "every rank has all rows")
    else:
        ways = {"ring": _ring(call), "rows": _rows(call), "heads": _heads(call)}
        why_not = _refusals(call)
    header = HEADER_BYTES * (call.ranks - 1)
    sent = {name: tuple(header + each for each, _ in costs) for name, costs in ways.items()}
    memory = {name: tuple(each for _, each in costs) for name, costs in ways.items()}
    fitting = [name for name in ways if name not in why_not]
    return Plan(min(fitting, key=lambda name: max(sent[name])), sent, memory, why_not)


def chosen_method(name: str, plan: Plan, method: str) -> str:
    """Raises for an unknown method, or one that cannot run the call."""
    if not isinstance(method, str) or method not in METHODS:
        raise ValueError(f"{name}: method is {shown(method)}; use one of {', '.join(map(repr, METHODS))}")
    if method == "auto":
        return plan.method
    if why := plan.why_not.get(method):
        raise NotImplementedError(f"{name}: method {method!r} does not fit: {why}; use method='auto'")
    return method


def _refusals(call: PrefillCall) -> dict[str, str]:
    refusals = {}
    for heads, kind in ((call.key.shape[1], "key-value heads"), (call.query.shape[1], "query heads")):
        if heads % call.ranks:
            refusals["heads"] = f"{heads} {kind} do not divide among {call.ranks} ranks"
    if call.has_row_mask:
        refusals["heads"] = "the attn_mask may differ between rows, and each rank has its own rows of it"
    if call.mask is not None:
        refusals["rows"] = "an attn_mask is that of each rank's own rows"
    return refusals


Costs = list[tuple[int, int]]  # per rank: bytes sent, and bytes of memory without operands


def _row_bytes(call: PrefillCall) -> int:
    """Bytes of a query row, all heads."""
    return call.query.shape[:2].numel() * call.query.shape[3] * call.query.element_size()


def _out_bytes(call: PrefillCall) -> int:
    """Bytes of a row of the result."""
    return call.query.shape[:2].numel() * call.value.shape[3] * call.query.element_size()


def _part_bytes(call: PrefillCall) -> int:
    """Bytes of a row of a partial result: out and the softmax sums, in float32."""
    return call.query.shape[:2].numel() * (call.value.shape[3] + SUMS) * FLOAT


def _key_bytes(call: PrefillCall) -> int:
    """Bytes of a position of key and value."""
    columns = call.query.shape[3] + call.value.shape[3]
    return call.key.shape[:2].numel() * columns * call.query.element_size()


def _parts(call: PrefillCall) -> Costs:
    part = call.row_count(0) * _part_bytes(call)
    return [((call.ranks - 1) * part, (call.ranks + 1) * part)] * call.ranks


def _ring(call: PrefillCall) -> Costs:
    ranks, hops = call.ranks, call.hops
    costs = []
    for rank in range(ranks):
        shards = [call.shards.counts[(rank - step) % ranks] * _key_bytes(call) for step in range(ranks)]
        passed = [shard for step, shard in enumerate(shards) if hops[(rank - step) % ranks] > step]
        part = call.row_count(rank) * _part_bytes(call)
        most = max(shards)  # one leaves while the other arrives
        costs.append((sum(passed), 2 * most + 4 * part))
    return costs


def _rows(call: PrefillCall) -> Costs:
    ranks = call.ranks
    counts = [call.row_count(rank) for rank in range(ranks)]
    gathered = max(counts) * _row_bytes(call)
    costs = []
    for count in counts:
        returned = (sum(counts) - count) * _part_bytes(call)
        memory = (ranks + 1) * gathered + 2 * (sum(counts) + ranks * count) * _part_bytes(call)
        costs.append(((ranks - 1) * gathered + returned, memory))
    return costs


def _heads(call: PrefillCall) -> Costs:
    ranks, all_rows, all_keys = call.ranks, call.rows.length, call.shards.length
    lse_bytes = call.query.shape[:2].numel() * FLOAT if call.return_lse else 0
    costs = []
    for rank in range(ranks):
        rows, keys = call.row_count(rank), call.shards.counts[rank]
        operands = (rows * _row_bytes(call) + keys * _key_bytes(call)) * (ranks - 1) // ranks
        results = (all_rows - rows) * (_out_bytes(call) + lse_bytes) // ranks
        whole = (all_rows * (_row_bytes(call) + _out_bytes(call)) + all_keys * _key_bytes(call)) // ranks
        costs.append((operands + results, 2 * whole))
    return costs


def work_of(call: PrefillCall) -> tuple[float, ...]:
    """Each rank's share of the scores that are not hidden by position."""
    pairs = call.scores.seen.pairs
    every = ((0, call.shards.length),)
    scores = [
        sum(
            pairs(first, rows, key + keys) - pairs(first, rows, key)
            for first, rows in call.row_runs[rank]
            for key, keys in (call.shards.runs[rank] if call.is_replicated else every)
        )
        for rank in range(call.ranks)
    ]
    return tuple(count / max(sum(scores), 1) for count in scores)
