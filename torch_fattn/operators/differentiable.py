"""The prefills with gradients. The autograd node is in csrc/ops/differentiable.cpp."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import Unpack

from ..runtime.signatures import public
from .options import PrefillOptions, VarlenPrefillOptions
from .return_lse import with_lse

__all__ = ["MAX_BACKWARD_HEAD_DIM", "attention", "needs_gradient", "varlen_attention"]

MAX_BACKWARD_HEAD_DIM = 256  # of query, key and value


def needs_gradient(*operands: Tensor | None) -> bool:
    """Whether a result of these operands needs a graph."""
    return torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in operands)


@with_lse
@public("fattn.attention", options="attention")
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *,
    return_lse: bool = False,
    **options: Unpack[PrefillOptions],
) -> Tensor | tuple[Tensor, Tensor]:
    """`prefill` with gradients of query, key, value, sinks and alibi_slopes.

    Args:
        query: `[B, Hq, Lq, D]`, float32, float16 or bfloat16. D is a multiple of 8, up to 256 with gradients,
            else up to 576.
        key: `[B, Hkv, Lk, D]` of the same dtype.
        value: `[B, Hkv, Lk, Dv]` of the same dtype; Dv like D.
        attn_mask: as in `prefill`, but not differentiable: one that requires grad is refused.
        return_lse: also return lse, which is differentiable.

    The graph keeps the operands, lse (4 bytes per row and head), and out in 32 bits: a 16-bit out on mps with
    what rounding took off, elsewhere not at all. The backward recomputes the scores and sums in a fixed
    order, so gradients are deterministic, bit for bit. Rows that see no key have gradient 0.

    It supports torch.compile, `torch.utils.checkpoint`, torch.autocast, `torch.func.grad` and
    `torch.func.vmap`, but not second derivatives or forward mode.

    Returns:
        the results of `prefill`, bit for bit.
    """
    out, lse = torch.ops.fattn.attention(query, key, value, attn_mask, **options)
    return (out, lse) if return_lse else out


@with_lse
@public("fattn.varlen_attention", options="varlen_attention")
def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    return_lse: bool = False,
    **options: Unpack[VarlenPrefillOptions],
) -> Tensor | tuple[Tensor, Tensor]:
    """`varlen_prefill` with gradients, as `attention` is `prefill` with gradients.

    Args:
        query, key, value: `[Tq, Hq, D]`, `[Tk, Hkv, D]` and `[Tk, Hkv, Dv]`, as in `varlen_prefill`. Dtypes
            and head dims are those of `attention`.
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k: as in `varlen_prefill`. Where results are NaN,
            so are gradients.
        return_lse: also return lse, which is differentiable.

    Rows and keys that belong to no sequence have gradient 0.

    Returns:
        the results of `varlen_prefill`, bit for bit.
    """
    out, lse = torch.ops.fattn.varlen_attention(
        query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **options
    )
    return (out, lse) if return_lse else out
