"""`prefill` over keys that the ranks of a group share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

from torch import Tensor

from ..operators.options import PrefillOptions
from ..operators.parts import merge_parts, result_dtype
from ..runtime.options import with_defaults
from ..runtime.signatures import public
from .call import PrefillCall, prefill_call
from .dtensor import is_dtensor, placed
from .exchange import Exchange, Facts
from .facts import facts_of, refuse_gradients
from .gather_rows import gather_rows
from .heads import exchange_heads
from .local_prefill import attend
from .parts import Part, merge_ranks
from .planner import Method, chosen_method, plan_of
from .ring import ring
from .shards import Shards

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["prefill"]

NAME = "torch_fattn.distributed.prefill"


@overload
def prefill(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = ...,
    *,
    group: Any = ...,
    shards: Shards | None = ...,
    query_shards: Shards | Literal["keys", "replicated"] = ...,
    method: Method = ...,
    return_lse: Literal[False] = ...,
    **options: Unpack[PrefillOptions],
) -> Tensor: ...
@overload
def prefill(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = ...,
    *,
    group: Any = ...,
    shards: Shards | None = ...,
    query_shards: Shards | Literal["keys", "replicated"] = ...,
    method: Method = ...,
    return_lse: Literal[True],
    **options: Unpack[PrefillOptions],
) -> tuple[Tensor, Tensor]: ...
@public(NAME, options="prefill")
def prefill(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *,
    group: Any = None,
    shards: Shards | None = None,
    query_shards: Shards | Literal["keys", "replicated"] = "keys",
    method: Method = "auto",
    return_lse: bool = False,
    **options: Unpack[PrefillOptions],
) -> Tensor | tuple[Tensor, Tensor]:
    """`torch_fattn.prefill` over keys of which every rank of `group` holds a part of the positions.

    Args:
        query: this rank's rows, `[B, Hq, own Lq, D]`; or all rows, with query_shards "replicated". Query, key
            and value may be DTensors on one mesh of one dimension: key and value placed as Shard(2), query
            as Shard(2) or Replicate(). They need no group or shards, and the result is placed as query.
        key, value: this rank's keys and values, `[B, Hkv, own Lk, D]` and `[B, Hkv, own Lk, Dv]`, in the
            order of their positions.
        attn_mask: this rank's rows and the keys of all ranks in the order of their positions, broadcastable
            to `[B, Hq, own Lq, Lk]`; with query_shards "replicated" all rows and this rank's keys, likewise
            to `[B, Hq, Lq, own Lk]`. It has one dtype on all ranks.
        group: a process group, a DeviceMesh of one dimension, or None for the default group.
        shards: which positions each rank holds. Default: rank r has the r-th run of as many positions as key
            has, which must then be the same number on every rank.
        query_shards: which rows each rank has, counted from row 0. "keys": as `shards`. "replicated": every
            rank has all rows, and gets the whole result.
        method: "ring", "rows", "heads", or "auto", the one of least bytes (`explain` shows them). "ring":
            keys and values pass from rank to rank, the next ones while the present ones are attended to.
            "rows": the rows are gathered, and partial results sent back. "heads": an all-to-all gives each
            rank all positions of some heads; its attn_mask must be one for all rows, and "rows" takes none.
            Replicated rows have one method: partial results are gathered.
        q_offset: absolute position of row 0 of all rows. Default: Lk - Lq, both of all ranks.
        mask_map: of attn_mask, with query_shards "replicated"; no effect otherwise.
        options: those of `torch_fattn.prefill`, the same on every rank. Windows, sink_tokens and ALiBi count
            positions of the whole sequence; a sink counts once.

    Returns:
        As `torch_fattn.prefill`, the rows of query. The result of replicated rows has the same bits on every
        rank.

    Raises:
        RuntimeError: a rank ended, stalled beyond the group's timeout, refused its arguments, or is in
            another call.
        ValueError: ranks pass different shapes, options or shards; others as in `torch_fattn.prefill`.
        NotImplementedError: gradients.

    Shards of keys that no row of a rank sees, because of causality or windows, are not attended to, and are
    not sent beyond the last rank that sees them.

    Ring attention: Liu, Zaharia & Abbeel 2023. Zigzag shards: Zhu 2024 ("ring-flash-attention"). Passing rows
    in place of keys: Yang et al. 2024 ("Context parallelism for scalable million-token inference"). Exchange
    of heads: Jacobs et al. 2023 ("DeepSpeed Ulysses").
    """
    if is_dtensor(query) or is_dtensor(key) or is_dtensor(value):
        if group is not None or shards is not None or query_shards != "keys":
            raise ValueError(
                f"{NAME}: group, shards or query_shards are given for DTensors; their placements say it"
            )
        local = placed(NAME, query, key, value, attn_mask)
        over = {"group": local.mesh, "shards": local.shards, "query_shards": local.query_shards}
        results = prefill(*local.operands, attn_mask, method=method, return_lse=True, **over, **options)
        out, lse = local.whole(*results)
        return (out, lse) if return_lse else out

    exchange = Exchange(NAME, group)
    every: dict[str, Any] = {**with_defaults("prefill", options)}
    token_major_out = every.pop("token_major_out")

    def prepare() -> tuple[Facts, tuple[PrefillCall, Any]]:
        refuse_gradients(NAME, {"query": query, "key": key, "value": value})
        call = prefill_call(
            *(exchange, query, key, value, attn_mask, shards, query_shards, every, return_lse)
        )
        chosen = chosen_method(NAME, plan_of(call.sizes), method)
        facts = facts_of(
            NAME,
            query,
            query.shape[2] if call.is_replicated else call.rows.length,
            key.shape[1],
            value.shape[3],
            {**options, "attn_mask": attn_mask, "return_lse": return_lse, "method": chosen},
            call.shards,
            call.query_shards,
        )
        # The partial result of replicated rows needs nothing from the others.
        return facts, (call, _own_part(call) if call.is_replicated else chosen)

    call, prepared = exchange.agree(prepare)
    if call.is_replicated:
        out, lse = merge_ranks(exchange, prepared, result_dtype(query))
    elif prepared == "heads":
        out, lse = exchange_heads(call, return_lse)
    else:
        part = ring([call])[0] if prepared == "ring" else gather_rows(call)
        out, lse = merge_parts([part[0]], [part[1]], result_dtype(query))
    if token_major_out:
        out = out.transpose(1, 2).contiguous().transpose(1, 2)
    return (out, lse) if return_lse else out


def _own_part(call: PrefillCall) -> Part:
    rank = call.exchange.rank
    keys = call.shards.runs[rank]
    rows = call.rows_of(rank)
    with_sinks = rank == 0  # a sink counts once
    return attend(call.query, rows, call.key, call.value, keys, call.mask, call.scores, with_sinks=with_sinks)
