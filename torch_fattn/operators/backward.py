"""The gradients of the prefills as Python functions, documented."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from ..runtime.signatures import public
from .options import PrefillOptions, VarlenPrefillOptions

__all__ = ["Gradients", "prefill_backward", "varlen_prefill_backward"]

Gradients = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]


@public("fattn.prefill_backward", options="prefill_backward")
def prefill_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor | None,
    lse: Tensor,
    attn_mask: Tensor | None = None,
    *,
    out_remainder: Tensor | None = None,
    **options: Unpack[PrefillOptions],
) -> Gradients:
    """The gradients of `prefill`, from those of its results. Scores are recomputed tile by tile, never
    stored.

    Args:
        grad_out: the gradient of out, `[B, Hq, Lq, Dv]`, of the dtype of query; any strides.
        grad_lse: the gradient of lse, float32 `[B, Hq, Lq]`; None if lse was not used.
        query, key, value: the operands of the forward. D and Dv are multiples of 8, 8 to 256.
        out: the result of the forward, or None. In float32 it saves a pass over the keys. In 16 bits it is
            read only with out_remainder: where one key has most of a row's weight, its rounding error would
            exceed the gradient.
        lse: the other result of the forward, with these options.
        attn_mask: as in `prefill`; not differentiable.
        out_remainder: what rounding to 16 bits took off out, as `attention` keeps it on mps: the third result
            of `torch.ops.fattn.attention.with_remainder`, or of the same overload of `varlen_attention`.
        token_major_out: the layout of out in the forward; the gradients do not depend on it.

    Returns:
        The gradients of query, key, value, sinks and alibi_slopes, contiguous, each of the shape and dtype of
        its tensor; None for sinks or slopes that are absent. Sums are float32. A row that sees no key has
        gradient 0 and adds nothing to other gradients, except that its lse is the sink's logit, which gets
        grad_lse. A key that no row sees has gradient 0. NaN in a query row or its grad_out makes the
        gradients of other keys of its sequence and head undefined.

    The operator `torch.ops.fattn.prefill_backward` returns a tensor of shape `[0]` instead of None.

    Raises:
        ValueError: shapes, strides or values that do not fit.
        TypeError: dtypes.
        NotImplementedError: not built.
        RuntimeError: from `backward`; second derivatives are not supported.

    The method is FlashAttention's (Dao et al. 2022, 2023), in two passes, one over rows and one over keys, so
    that the summation order is fixed.
    """
    results = torch.ops.fattn.prefill_backward(
        grad_out, grad_lse, query, key, value, out, lse, attn_mask, out_remainder=out_remainder, **options
    )
    return _gradients(results, options)


@public("fattn.varlen_prefill_backward", options="varlen_prefill_backward")
def varlen_prefill_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor | None,
    lse: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    out_remainder: Tensor | None = None,
    **options: Unpack[VarlenPrefillOptions],
) -> Gradients:
    """The gradients of `varlen_prefill`, from those of its results, as `prefill_backward` computes them.

    Args:
        grad_out: the gradient of out, `[Tq, Hq, Dv]`, of the dtype of query; any strides.
        grad_lse: the gradient of lse, float32 `[Hq, Tq]`; None if lse was not used.
        query, key, value: the operands of the forward. D and Dv are multiples of 8, 8 to 256.
        out, lse, out_remainder: the results of the forward, as in `prefill_backward`.
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k: as in `varlen_prefill`.

    Returns:
        The gradients of query, key, value, sinks and alibi_slopes, as those of `prefill_backward`. Rows and
        keys of no sequence have gradient 0, and grad_out, grad_lse and lse are not read there.
    """
    results = torch.ops.fattn.varlen_prefill_backward(
        *(grad_out, grad_lse, query, key, value, out, lse),
        *(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
        out_remainder=out_remainder,
        **options,
    )
    return _gradients(results, options)


def _gradients(results: tuple[Tensor, ...], options: Mapping[str, Any]) -> Gradients:
    query, key, value, of_sinks, of_slopes = results
    has_sinks, has_slopes = (options.get(name) is not None for name in ("sinks", "alibi_slopes"))
    return query, key, value, of_sinks if has_sinks else None, of_slopes if has_slopes else None
