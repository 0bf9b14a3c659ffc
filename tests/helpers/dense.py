"""Attention as torch's autograd differentiates it: whole matrices of scores, in the dtype of the operands.

Independent of `torch_fattn.reference`. In float64 it is what gradients are compared to.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


def dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    q_offset: int | None = None,
    window_left: int = -1,
    window_right: int = -1,
    sink_tokens: int = 0,
    softcap: float = 0.0,
    scale: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The out and lse of `prefill`, of `[B, H, L, D]`. A row that sees no key has out 0 and lse -inf."""
    group = query.shape[1] // key.shape[1]
    key, value = (operand.repeat_interleave(group, dim=1) for operand in (key, value))
    rows, keys = query.shape[2], key.shape[2]
    first = keys - rows if q_offset is None else q_offset
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(keys, device=query.device) - (
        torch.arange(rows, device=query.device)[:, None] + first
    )
    if alibi_slopes is not None:
        scores = scores + alibi_slopes[..., None, None].to(scores.dtype) * distance
    seen = torch.ones_like(distance, dtype=torch.bool)
    if window_left >= 0:
        seen &= distance >= -window_left
    if window_right >= 0 and not is_causal:
        seen &= distance <= window_right
    seen |= torch.arange(keys, device=query.device) < sink_tokens
    if is_causal:
        seen &= distance <= 0
    seen = seen.expand(scores.shape)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        seen = seen & attn_mask
    elif attn_mask is not None:
        scores = scores + attn_mask
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        column = sinks[:, None, None].to(scores.dtype).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, column), -1)
    empty = scores.isneginf().all(-1, keepdim=True)
    weights = scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
    lse = scores.masked_fill(empty, 0.0).logsumexp(-1).masked_fill(empty[..., 0], -torch.inf)
    return weights[..., :keys] @ value, lse


def dense_sequences(
    query: Tensor, key: Tensor, value: Tensor, *, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """The out and lse of `varlen_prefill`, of `[T, H, D]`: `dense_attention` of each sequence."""
    out, lse = query.new_zeros(*query.shape[:2], value.shape[-1]), query.new_zeros(query.shape[1::-1])
    cu_q, cu_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    options = {n: v for n, v in options.items() if not n.startswith("max_")}
    for rows, keys in zip(pairwise(cu_q), pairwise(cu_k), strict=True):
        if rows[0] == rows[1] or keys[0] == keys[1]:
            continue
        of_one = (
            t[slice(*at)].transpose(0, 1)[None] for t, at in ((query, rows), (key, keys), (value, keys))
        )
        found, sums = dense_attention(*of_one, **options)
        out = out.index_add(0, torch.arange(*rows), found[0].transpose(0, 1))
        lse = lse.index_add(1, torch.arange(*rows), sums[0])
    return out, lse
