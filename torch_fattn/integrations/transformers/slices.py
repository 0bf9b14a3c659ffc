"""Prompts whose heads are wider than prefill takes: decode takes them, 16 query rows at a time.

It costs launches, and every slice reads all the keys that it sees; it needs no memory for scores.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..._ops import MAX_DECODE_ROWS, MAX_PREFILL_HEAD_DIM


def needs_slices(query: Tensor, value: Tensor) -> bool:
    return max(query.shape[-1], value.shape[-1]) > MAX_PREFILL_HEAD_DIM


def prefill_causal(
    query: Tensor, key: Tensor, value: Tensor, seq_lens: Tensor | None, mask: Tensor | None, **options: Any
) -> Tensor:
    """`decode` for any number of rows. `mask` says nothing of rows: `[B, 1, 1, Lk]`."""
    q_len, kv_len = query.shape[2], key.shape[2]
    outs = []
    for begin in range(0, q_len, MAX_DECODE_ROWS):
        rows = query[:, :, begin : begin + MAX_DECODE_ROWS]
        newer = q_len - begin - rows.shape[2]
        filled = kv_len - newer if seq_lens is None else kv_len
        out, _lse = torch.ops.fattn.decode(
            rows,
            key[:, :, :filled],
            value[:, :, :filled],
            None if seq_lens is None else seq_lens - newer,
            attn_mask=None if mask is None else mask[..., :filled],
            **options,
        )
        outs.append(out)
    return torch.cat(outs, dim=2)


def prefill_whole(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    sinks: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """`prefill` of rows that see every key that `mask` does not hide. Decode's rows are causal, but its heads
    are not: rows become heads, of which any number share a key-value head."""
    heads = query.shape[1]
    outs: list[Tensor] = []
    for rows in query.split(MAX_DECODE_ROWS, dim=2):
        count = rows.shape[2]
        visible = mask
        if mask is not None and mask.shape[1:3] != (1, 1):
            begin = len(outs) * MAX_DECODE_ROWS
            visible = mask if mask.shape[2] == 1 else mask[:, :, begin : begin + count]
            visible = visible.expand(-1, heads, count, -1).flatten(1, 2)[:, :, None]
        out, _lse = torch.ops.fattn.decode(
            rows.flatten(1, 2)[:, :, None],
            key,
            value,
            attn_mask=visible,
            sinks=None if sinks is None else sinks.repeat_interleave(count),
            **options,
        )
        outs.append(out.unflatten(1, (heads, count))[:, :, :, 0])
    return torch.cat(outs, dim=2)


def paged_prefill(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    **options: Any,
) -> Tensor:
    """The operator of this name in one call of `paged_decode`: each slice is a sequence that ends with its
    last row. Only the device knows where the sequences begin, so there are as many slices as there could be.
    The first rows of a slice that has fewer are computed for nothing."""
    tokens, sequences = query.shape[0], seq_lens.shape[0]
    begins, ends = cu_seqlens_q[:-1], cu_seqlens_q[1:]
    counts = (ends - begins + MAX_DECODE_ROWS - 1) // MAX_DECODE_ROWS
    counted = counts.cumsum(0)

    slices = torch.arange(tokens // MAX_DECODE_ROWS + sequences, device=query.device)
    owner = torch.searchsorted(counted, slices, right=True).clamp_(max=sequences - 1)
    place = slices - (counted - counts)[owner]
    slice_ends = torch.minimum(begins[owner] + (place + 1) * MAX_DECODE_ROWS, ends[owner])
    lens = seq_lens[owner] - (ends[owner] - slice_ends)
    rows = slice_ends[:, None] - torch.arange(MAX_DECODE_ROWS, 0, -1, device=query.device)
    out, _lse = torch.ops.fattn.paged_decode(
        query[rows.clamp_(0, tokens - 1)].transpose(1, 2),
        key_cache,
        value_cache,
        block_tables[owner],
        torch.where(slices < counted[-1], lens, 0).to(torch.int32),
        **options,
    )

    token = torch.arange(tokens, device=query.device)
    owner = torch.searchsorted(ends, token, right=True).clamp_(max=sequences - 1)
    of_slice = (counted - counts)[owner] + (token - begins[owner]) // MAX_DECODE_ROWS
    of_slice.clamp_(max=slices.shape[0] - 1)  # rows of no sequence
    row = MAX_DECODE_ROWS - (slice_ends[of_slice] - token)
    return out.transpose(1, 2)[of_slice, row.clamp_(0, MAX_DECODE_ROWS - 1)]
