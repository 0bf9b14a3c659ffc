"""Plans of calls across ranks: the method of a prefill, which is the one whose busiest rank sends the fewest
bytes, and `explain`, which needs no process group."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from typing_extensions import Unpack

from ..operators.kv_formats import head_dim
from ..operators.options import PrefillOptions
from ..runtime.options import with_defaults
from ..runtime.signatures import public, shown
from .call import PrefillCall, check_ranks, prefill_call
from .exchange import HEADER_BYTES, Exchange
from .local import SUMS
from .shards import Shards

Method = Literal["auto", "ring", "rows", "heads"]
METHODS = ("auto", "ring", "rows", "heads")

FLOAT = 4  # bytes of a float32
NAME = "torch_fattn.distributed.explain"
MOST_RANKS = 1024
OPS = ("prefill", "decode", "paged_decode")


@dataclass(frozen=True)
class Plan:
    """The method of a call, and what each method costs."""

    method: str
    sent: dict[str, tuple[int, ...]]  # bytes that each rank sends, by method
    memory: dict[str, tuple[int, ...]]  # bytes of each rank beside its operands, by method
    why_not: dict[str, str]  # methods that cannot run the call


def plan_of(call: PrefillCall) -> Plan:
    ways, why_not = _costs(call), _refusals(call)
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
    if call.is_replicated:
        return dict.fromkeys(METHODS[1:], "every rank has all rows")
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


def _costs(call: PrefillCall) -> dict[str, Costs]:
    """The costs of each method."""
    ranks, item = call.ranks, call.query.element_size()
    heads, dim, value_dim = call.query.shape[:2].numel(), call.query.shape[3], call.value.shape[3]
    # Bytes of a row or position, all heads.
    row, out, lse = heads * dim * item, heads * value_dim * item, heads * FLOAT if call.return_lse else 0
    part = heads * (value_dim + SUMS) * FLOAT
    key = call.key.shape[:2].numel() * (dim + value_dim) * item
    counts = [call.row_count(rank) for rank in range(ranks)]
    if call.is_replicated:
        parts = counts[0] * part
        return {"parts": [((ranks - 1) * parts, (ranks + 1) * parts)] * ranks}
    shards = [count * key for count in call.shards.counts]
    gathered, total = max(counts) * row, sum(counts)
    whole = (total * (row + out) + sum(shards)) // ranks
    costs: dict[str, Costs] = {"ring": [], "rows": [], "heads": []}
    for rank, count in enumerate(counts):
        passed = [shards[n] for n, hops in enumerate(call.hops) if hops > (rank - n) % ranks]
        costs["ring"].append((sum(passed), 2 * max(shards) + 4 * count * part))  # one leaves, one arrives
        sent = (ranks - 1) * gathered + (total - count) * part
        costs["rows"].append((sent, (ranks + 1) * gathered + 2 * (total + ranks * count) * part))
        operands = (count * row + shards[rank]) * (ranks - 1) // ranks
        results = (total - count) * (out + lse) // ranks
        costs["heads"].append((operands + results, 2 * whole))
    return costs


def work_of(call: PrefillCall) -> tuple[float, ...]:
    """Each rank's share of the scores that are not hidden by position."""
    pairs = call.scores.visibility.pairs
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


class Explanation:
    """The plan of a call across ranks. `str()` is for reading, `.data` for programs."""

    def __init__(self, op: str, plan: Plan, work: tuple[float, ...]) -> None:
        self.op = op
        self.data: dict[str, Any] = {
            "ranks": len(work),
            "method": plan.method,
            "sent_bytes": plan.sent,
            "memory_bytes": plan.memory,
            "why_not": plan.why_not,
            "work": work,
        }

    def __str__(self) -> str:
        data = self.data
        lines = [f"torch_fattn.distributed.{self.op} on {data['ranks']} ranks: {data['method']}"]
        for name, sent in data["sent_bytes"].items():
            why = data["why_not"].get(name)
            cost = (
                f"a rank sends up to {max(sent):,} bytes, and keeps up to {max(data['memory_bytes'][name]):,}"
            )
            lines.append(f"  {name:<6} {cost if why is None else f'does not fit: {why}'}")
        shares = "  ".join(f"{share:.0%}" for share in data["work"])
        lines.append(f"  work   {shares} of all scores, by rank")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<Explanation of torch_fattn.distributed.{self.op}: {self.data['method']}>"


@public(NAME, options="prefill")
def explain(
    op: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    ranks: int,
    shards: Shards | None = None,
    query_shards: Shards | Literal["keys", "replicated"] = "keys",
    method: Method = "auto",
    kv_format: str = "auto",
    attn_mask: Tensor | None = None,
    return_lse: bool = False,
    **options: Unpack[PrefillOptions],
) -> Explanation:
    """The bytes that a call of `op`, "prefill", "decode" or "paged_decode", would send and keep on `ranks`
    ranks with each method.

    Args:
        query, key, value: the operands of rank 0 (pools for "paged_decode"); tensors on "meta" will do.
        ranks: the size of the group. No process group is needed.
        shards, query_shards, method, kv_format, attn_mask, return_lse, options: those of the function. The
            bytes that a decode sends do not depend on its options.

    The bytes sent are those of one call to all other ranks, headers included. The bytes kept are approximate,
    per rank, without operands and result. The work of a rank is its share of the scores.
    """
    if op not in OPS:
        raise ValueError(f"{NAME}: {shown(op)} is not a function across ranks; use one of {', '.join(OPS)}")
    if not 1 <= ranks <= MOST_RANKS:
        raise ValueError(f"{NAME}: ranks is {ranks}; pass a number from 1 to {MOST_RANKS}")
    if query.dim() != 4 or key.dim() != 4 or value.dim() != 4:
        raise ValueError(f"{NAME}: query, key and value must have 4 dimensions; see torch_fattn.{op}")
    if op == "prefill":
        every: dict[str, Any] = {**with_defaults("prefill", options)}
        every.pop("token_major_out")
        place = Exchange.planned(NAME, ranks)
        call = prefill_call(place, query, key, value, attn_mask, shards, query_shards, every, return_lse)
        plan = plan_of(call)
        plan = replace(plan, method=chosen_method(NAME, plan, method))
        return Explanation(op, plan, work_of(call))
    columns = head_dim(value.shape[3], kv_format if value.dtype == torch.uint8 else None)
    part = query.shape[:3].numel() * (columns + SUMS) * FLOAT
    sent = (ranks - 1) * (part + HEADER_BYTES)
    plan = Plan("parts", {"parts": (sent,) * ranks}, {"parts": ((ranks + 1) * part,) * ranks}, {})
    if shards is not None:
        check_ranks(NAME, "shards", shards, ranks)
    counts = (1,) * ranks if shards is None else shards.counts
    return Explanation(op, plan, tuple(count / max(sum(counts), 1) for count in counts))
