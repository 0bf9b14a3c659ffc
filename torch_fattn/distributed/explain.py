"""Plans of calls across ranks: bytes sent and kept, without a process group."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from ..operators.kv_formats import head_dim
from ..operators.options import PrefillOptions
from ..runtime.options import with_defaults
from ..runtime.signatures import public, shown
from .call import check_ranks, prefill_call
from .exchange import HEADER_BYTES, Exchange
from .local import SUMS
from .planner import FLOAT, Method, Plan, chosen_method, plan_of, work_of
from .shards import Shards

if TYPE_CHECKING:
    from typing_extensions import Unpack

NAME = "torch_fattn.distributed.explain"
MOST_RANKS = 1024
OPS = ("prefill", "decode", "paged_decode")


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
