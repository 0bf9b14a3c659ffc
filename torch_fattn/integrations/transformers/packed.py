"""Packed sequences: several in one row of the batch, cut by cumulative lengths, without a mask."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.utils.import_utils import is_tracing

from ...operators.differentiable import needs_gradient
from ...operators.head_padding import pad_heads, without_padding
from .patterns import read_packed


def compute_packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    **options: Any,
) -> Tensor:
    """Attention of query, key and value `[B, H, L, ..]`, packed row by row; out is `[B, L, Hq, Dv]`."""
    batch, _heads, length, _dim = query.shape
    value_dim = value.shape[-1]
    query, key, value, options["scale"] = pad_heads(query, key, value, options.get("scale"))
    trains = needs_gradient(query, key, value, options.get("sinks"))
    prefill = torch.ops.fattn.varlen_attention if trains else torch.ops.fattn.varlen_prefill
    out, _lse = prefill(
        *(operand.transpose(1, 2).flatten(0, 1) for operand in (query, key, value)),
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        **options,
    )
    return without_padding(out, value_dim).unflatten(0, (batch, length))


def compute_pattern(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **options: Any) -> Tensor:
    """The packed sequences of a mask, if it is a `PackedPattern`."""
    pattern = read_packed(mask)
    lens, longest = pattern.cu_seqlens, pattern.max_seqlen
    options |= {"is_causal": True, "window_left": pattern.window_left}
    return compute_packed(query, key, value, lens, lens, longest, longest, **options)


def begins_of(keywords: dict[str, Any], query: Tensor) -> Tensor | None:
    """bool `[B, Lq]`: where sequences begin, by FlashAttention's keywords; None if they are absent."""
    cu_q: Tensor | None = keywords.get("cu_seq_lens_q")
    if cu_q is None or is_tracing(cu_q):
        return None
    batch, _heads, rows, _dim = query.shape
    begins = torch.zeros(batch * rows + 1, dtype=torch.bool, device=query.device)
    return begins.index_fill_(0, cu_q.to(query.device).long(), True)[:-1].unflatten(0, (batch, rows))


def lengths_of(keywords: dict[str, Any], query: Tensor) -> tuple[Tensor, Tensor, int, int] | None:
    """The arguments of `compute_packed` from FlashAttention's keywords; None if they are absent. A missing
    longest length costs one wait for the device."""
    cu_q, cu_k = keywords.get("cu_seq_lens_q"), keywords.get("cu_seq_lens_k")
    if cu_q is None or cu_k is None:
        return None
    cu_q, cu_k = (lens.to(device=query.device, dtype=torch.int32) for lens in (cu_q, cu_k))
    longest = (keywords.get(name) for name in ("max_length_q", "max_length_k"))
    max_q, max_k = (
        int(lens.diff().max() if given is None else given)
        for lens, given in zip((cu_q, cu_k), longest, strict=True)
    )
    return cu_q, cu_k, max_q, max_k
