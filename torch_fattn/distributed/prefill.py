"""`prefill` and `varlen_prefill` over keys that are sharded across ranks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, Literal

import torch
from torch import Tensor
from typing_extensions import Unpack

from ..operators.options import PrefillOptions, VarlenPrefillOptions
from ..operators.parts import merge_parts, result_dtype, token_major
from ..operators.return_lse import with_lse
from ..runtime.options import with_defaults
from ..runtime.signatures import public
from .call import PrefillCall, check_ranks, local_operands, prefill_call
from .exchange import Exchange, Facts, facts_of, is_dtensor, refuse_dtensors, refuse_gradients
from .local import merge_ranks
from .methods import attend_to, exchange_heads, gather_rows, ring
from .planner import Method, chosen_method, plan_of
from .shards import Shards

NAME = "torch_fattn.distributed.prefill"
VARLEN_NAME = "torch_fattn.distributed.varlen_prefill"


@with_lse
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
    """`torch_fattn.prefill` over keys whose positions are sharded across the ranks of `group`.

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
        shards: which positions each rank holds. Default: rank r has the r-th run of own-Lk positions; own Lk
            must then be the same on every rank.
        query_shards: which rows each rank has, counted from row 0. "keys": as `shards`. "replicated": every
            rank has all rows and the whole result.
        method: "ring", "rows", "heads", or "auto", which sends the fewest bytes (`explain` shows them).
            "ring": keys and values pass from rank to rank while each rank attends to those it has. "rows":
            the rows are gathered, and partial results sent back; takes no attn_mask. "heads": an all-to-all
            gives each rank all positions of some heads; attn_mask must be the same for all rows. Replicated
            rows always gather partial results.
        q_offset: absolute position of row 0 of all rows. Default: Lk - Lq, both of all ranks.
        mask_map: of attn_mask, with query_shards "replicated"; no effect otherwise.
        options: those of `torch_fattn.prefill`, the same on every rank. Windows, sink_tokens and ALiBi count
            positions of the whole sequence; a sink counts once.

    Returns:
        As `torch_fattn.prefill`, the rows of query. The result of replicated rows is bit-identical on every
        rank.

    Raises:
        RuntimeError: a rank exited, exceeded the group's timeout, refused its arguments, or is in another
            call.
        ValueError: ranks pass different shapes, options or shards; others as in `torch_fattn.prefill`.
        NotImplementedError: gradients.

    A rank skips shards of keys that causality or windows hide from all its rows. A shard is not sent beyond
    the last rank that sees it.

    Ring attention: Liu, Zaharia & Abbeel 2023. Zigzag shards: Zhu 2024 ("ring-flash-attention"). Passing rows
    in place of keys: Yang et al. 2024 ("Context parallelism for scalable million-token inference"). Exchange
    of heads: Jacobs et al. 2023 ("DeepSpeed Ulysses").
    """
    if is_dtensor(query) or is_dtensor(key) or is_dtensor(value):
        if group is not None or shards is not None or query_shards != "keys":
            raise ValueError(
                f"{NAME}: group, shards or query_shards are given for DTensors; their placements say it"
            )
        local = local_operands(NAME, query, key, value, attn_mask)
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
        chosen = chosen_method(NAME, plan_of(call), method)
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
        if not call.is_replicated:
            return facts, (call, chosen)
        # Replicated rows need no keys from other ranks.
        return facts, (call, attend_to(call, key, value, exchange.rank, with_sinks=exchange.rank == 0))

    call, prepared = exchange.agree(prepare)
    if call.is_replicated:
        out, lse = merge_ranks(exchange, prepared, result_dtype(query))
    elif prepared == "heads":
        out, lse = exchange_heads(call, return_lse)
    else:
        part = ring([call])[0] if prepared == "ring" else gather_rows(call)
        out, lse = merge_parts([part[0]], [part[1]], result_dtype(query))
    if token_major_out:
        out = token_major(out)
    return (out, lse) if return_lse else out


@with_lse
@public(VARLEN_NAME, options="varlen_prefill")
def varlen_prefill(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    shards: Sequence[Shards],
    query_shards: Sequence[Shards] | None = None,
    *,
    group: Any = None,
    return_lse: bool = False,
    **options: Unpack[VarlenPrefillOptions],
) -> Tensor | tuple[Tensor, Tensor]:
    """`torch_fattn.varlen_prefill` of sequences that are each sharded over the ranks of `group`.

    Args:
        query: this rank's rows of all sequences, packed: `[own Tq, Hq, D]`, sequence after sequence.
        key, value: this rank's keys and values, likewise: `[own Tk, Hkv, D]` and `[own Tk, Hkv, Dv]`.
        shards: for each sequence, which of its positions each rank holds. They replace cu_seqlens.
        query_shards: for each sequence, which rows each rank has. Default: as `shards`.
        group: a process group, a DeviceMesh of one dimension, or None for the default group.
        q_offset: absolute position of row 0 of every sequence. Default: its keys less its rows.
        options: those of `torch_fattn.varlen_prefill`, the same on every rank.

    Returns:
        out `[own Tq, Hq, Dv]`; with return_lse also lse `[Hq, own Tq]`.

    The keys of all sequences pass from rank to rank together, as in the "ring" of `prefill`. A rank launches
    each sequence and shard separately. Errors are those of `prefill`.
    """
    exchange = Exchange(VARLEN_NAME, group)
    every = {**with_defaults("varlen_prefill", options)}

    def prepare() -> tuple[Facts, list[PrefillCall]]:
        operands = {"query": query, "key": key, "value": value}
        refuse_dtensors(VARLEN_NAME, operands)
        refuse_gradients(VARLEN_NAME, operands)
        starts = torch.empty(len(shards) + 1, dtype=torch.int32, device=query.device)
        torch.ops.fattn._plan_varlen_prefill(*operands.values(), starts, starts, 1, 1, **options)
        rows = shards if query_shards is None else query_shards
        if len(rows) != len(shards):
            raise ValueError(
                f"{VARLEN_NAME}: query_shards are of {len(rows)} sequences and shards of {len(shards)}; pass "
                "those of every sequence"
            )
        calls = _calls(exchange, (query, key, value), shards, rows, every)
        total = sum(each.length for each in rows)
        sizes = (query[None].transpose(1, 2), total, key.shape[1], value.shape[2])
        return facts_of(VARLEN_NAME, *sizes, options, shards, rows), calls

    calls = exchange.agree(prepare)
    out = query.new_empty(0, query.shape[1], value.shape[2], dtype=result_dtype(query))
    lse = query.new_empty(query.shape[1], 0, dtype=torch.float32)
    if calls:
        merged = [merge_parts([out], [sums], result_dtype(query)) for out, sums in ring(calls)]
        out = torch.cat([out[0].transpose(0, 1) for out, _ in merged])
        lse = torch.cat([lse[0] for _, lse in merged], 1)
    return (out, lse) if return_lse else out


def _calls(
    exchange: Exchange,
    operands: tuple[Tensor, Tensor, Tensor],
    shards: Sequence[Shards],
    rows: Sequence[Shards],
    options: dict[str, Any],
) -> list[PrefillCall]:
    """Each sequence as a batch of one."""
    own = {name: options[name] for name in options if name in VarlenPrefillOptions.__annotations__}
    split = []
    placed = (("query", "query_shards", rows), ("key", "shards", shards), ("value", "shards", shards))
    for operand, (what, which, of_sequences) in zip(operands, placed, strict=True):
        for each in of_sequences:
            check_ranks(VARLEN_NAME, which, each, exchange.ranks)
        counts = [each.count(exchange.rank) for each in of_sequences]
        if sum(counts) != operand.shape[0]:
            raise ValueError(
                f"{VARLEN_NAME}: {what} has {operand.shape[0]} tokens and {which} give {sum(counts)} to rank "
                f"{exchange.rank}; pass those of this rank"
            )
        bounds = pairwise(accumulate(counts, initial=0))
        split.append([operand[begin:end].transpose(0, 1)[None] for begin, end in bounds])
    calls = []
    for b, (query, key, value) in enumerate(zip(*split, strict=True)):
        slopes = own["alibi_slopes"]
        of_sequence = {**own, "alibi_slopes": slopes if slopes is None or slopes.dim() < 2 else slopes[b]}
        calls.append(prefill_call(exchange, query, key, value, None, shards[b], rows[b], of_sequence, False))
    return calls
