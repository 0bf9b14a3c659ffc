"""Exchange of heads (DeepSpeed Ulysses): one all-to-all gives each rank all positions of some heads, another
one gives the results back."""

from __future__ import annotations

import torch
from torch import Tensor

from .call import PrefillCall

__all__ = ["exchange_heads"]


def exchange_heads(call: PrefillCall, return_lse: bool) -> tuple[Tensor, Tensor]:
    """Returns out and lse of this rank's rows; without return_lse, an lse of no rows."""
    exchange, scores = call.exchange, call.scores
    query, key, value = _all_positions(call)
    heads = query.shape[1]
    own = slice(exchange.rank * heads, (exchange.rank + 1) * heads)
    mask = call.mask
    if mask is not None and mask.dim() > 2 and mask.shape[-3] != 1:
        mask = mask[..., own, :, :]
    out, lse = torch.ops.fattn.prefill(
        *(query, key, value, mask),
        is_causal=scores.is_causal,
        q_offset=call.q_offset,
        window_left=scores.window_left,
        window_right=scores.window_right,
        sink_tokens=scores.sink_tokens,
        sinks=None if scores.sinks is None else scores.sinks[own],
        alibi_slopes=None if scores.alibi_slopes is None else scores.alibi_slopes[..., own],
        **scores.pointwise,
    )
    return _own_rows(call, out), _own_rows(call, lse) if return_lse else lse[:, :, :0]


def _all_positions(call: PrefillCall) -> list[Tensor]:
    """Query, key and value of all positions and of this rank's heads."""
    exchange, rows, keys = call.exchange, call.rows, call.shards
    operands = ((call.query, rows), (call.key, keys), (call.value, keys))
    split = [operand.chunk(exchange.ranks, 1) for operand, _ in operands]
    leaving = [torch.cat([heads[rank].reshape(-1) for heads in split]) for rank in range(exchange.ranks)]
    shapes = [
        [(*heads[0].shape[:2], shards.count(rank), heads[0].shape[3]) for (_, shards), heads in pairs]
        for rank in range(exchange.ranks)
        for pairs in [list(zip(operands, split, strict=True))]
    ]
    sizes = [[torch.Size(shape).numel() for shape in of_rank] for of_rank in shapes]
    arrived = exchange.all_to_all(leaving, [[sum(of_rank)] for of_rank in sizes])
    pieces = [
        [piece.view(shape) for piece, shape in zip(both.split(size), of_rank, strict=True)]
        for both, size, of_rank in zip(arrived, sizes, shapes, strict=True)
    ]
    return [shards.join([of_rank[n] for of_rank in pieces], 2) for n, (_, shards) in enumerate(operands)]


def _own_rows(call: PrefillCall, result: Tensor) -> Tensor:
    """The rows of this rank and all heads, of a result of all rows and this rank's heads."""
    exchange, rows = call.exchange, call.rows
    leaving = [rows.take(result, 2, rank) for rank in range(exchange.ranks)]
    arrived = exchange.all_to_all(leaving, [leaving[exchange.rank].shape] * exchange.ranks)
    return torch.cat(arrived, 1)
