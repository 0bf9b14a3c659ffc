"""`varlen_prefill` over packed sequences, each of which is sharded on its own."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from ..operators.options import VarlenPrefillOptions
from ..operators.parts import merge_parts, result_dtype
from ..runtime.options import with_defaults
from ..runtime.signatures import public
from .call import PrefillCall, prefill_call
from .exchange import Exchange, Facts
from .facts import facts_of, refuse_dtensors, refuse_gradients
from .ring import ring
from .shards import Shards

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["varlen_prefill"]

NAME = "torch_fattn.distributed.varlen_prefill"


@overload
def varlen_prefill(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    shards: Sequence[Shards],
    query_shards: Sequence[Shards] | None = ...,
    *,
    group: Any = ...,
    return_lse: Literal[False] = ...,
    **options: Unpack[VarlenPrefillOptions],
) -> Tensor: ...
@overload
def varlen_prefill(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    shards: Sequence[Shards],
    query_shards: Sequence[Shards] | None = ...,
    *,
    group: Any = ...,
    return_lse: Literal[True],
    **options: Unpack[VarlenPrefillOptions],
) -> tuple[Tensor, Tensor]: ...
@public(NAME, options="varlen_prefill")
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
    """`torch_fattn.varlen_prefill` of sequences each of which is sharded over the ranks of `group`.

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

    The keys of all sequences pass from rank to rank together, as in the "ring" of `prefill`, whose errors
    these are. A rank has a launch for each sequence and shard, not one for all sequences.
    """
    exchange = Exchange(NAME, group)
    every = {**with_defaults("varlen_prefill", options)}

    def prepare() -> tuple[Facts, list[PrefillCall]]:
        operands = {"query": query, "key": key, "value": value}
        refuse_dtensors(NAME, operands)
        refuse_gradients(NAME, operands)
        starts = torch.empty(len(shards) + 1, dtype=torch.int32, device=query.device)
        torch.ops.fattn._plan_varlen_prefill(*operands.values(), starts, starts, 1, 1, **options)
        rows = shards if query_shards is None else query_shards
        if len(rows) != len(shards):
            raise ValueError(
                f"{NAME}: query_shards are of {len(rows)} sequences and shards of {len(shards)}; pass "
                "those of every sequence"
            )
        calls = _calls(exchange, (query, key, value), shards, rows, every)
        total = sum(each.length for each in rows)
        sizes = (query[None].transpose(1, 2), total, key.shape[1], value.shape[2])
        return facts_of(NAME, *sizes, options, shards, rows), calls

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
    for what, operand, of_sequences in zip(
        ("query", "key", "value"), operands, (rows, shards, shards), strict=True
    ):
        counts = [each.count(exchange.rank) if each.ranks == exchange.ranks else 0 for each in of_sequences]
        if sum(counts) != operand.shape[0] and all(each.ranks == exchange.ranks for each in of_sequences):
            which = "query_shards" if what == "query" else "shards"
            raise ValueError(
                f"{NAME}: {what} has {operand.shape[0]} tokens and {which} give {sum(counts)} to rank "
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
