"""Chooses the operator for a layer's attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...operators.differentiable import needs_gradient
from ...operators.head_padding import pad_heads, without_padding
from ..pytorch.routing import is_plain, torchs
from .visibility import Lengths


def compute(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    seq_lens: Tensor | None,
    *,
    causal: bool,
    **options: Any,
) -> Tensor:
    """Attention of query, key and value `[B, H, L, ..]`; out `[B, Lq, Hq, Dv]` is contiguous. A causal mask
    is `[B, 1, 1, Lk]`. seq_lens belongs to a causal query."""
    trains = needs_gradient(query, key, value, options.get("sinks"))
    if seq_lens is None and not trains and is_plain(options):
        torchs_out = torchs(query, key, value, mask, is_causal=causal, scale=options.get("scale"))
        if torchs_out is not None:
            return torchs_out.transpose(1, 2).contiguous()
    q_len = query.shape[2]
    value_dim = value.shape[-1]
    query, key, value, options["scale"] = pad_heads(query, key, value, options.get("scale"))
    # A single row sees every key even if causal.
    if not trains and (q_len == 1 or causal):
        out, _lse = torch.ops.fattn.decode(
            query, key, value, seq_lens, attn_mask=mask, token_major_out=True, **options
        )
    else:
        prefill = torch.ops.fattn.attention if trains else torch.ops.fattn.prefill
        out, _lse = prefill(
            query, key, value, mask, is_causal=causal, seq_lens=seq_lens, token_major_out=True, **options
        )
    return without_padding(out.transpose(1, 2), value_dim)


def compute_packed(query: Tensor, key: Tensor, value: Tensor, lengths: Lengths, **options: Any) -> Tensor:
    """Attention of query, key and value `[B, H, L, ..]`, packed row by row; out is `[B, L, Hq, Dv]`."""
    batch, _heads, length, _dim = query.shape
    value_dim = value.shape[-1]
    query, key, value, options["scale"] = pad_heads(query, key, value, options.get("scale"))
    trains = needs_gradient(query, key, value, options.get("sinks"))
    prefill = torch.ops.fattn.varlen_attention if trains else torch.ops.fattn.varlen_prefill
    operands = (operand.transpose(1, 2).flatten(0, 1) for operand in (query, key, value))
    out, _lse = prefill(*operands, *lengths, **options)
    return without_padding(out, value_dim).unflatten(0, (batch, length))
