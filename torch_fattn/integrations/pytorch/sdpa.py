"""`F.scaled_dot_product_attention` on torch_fattn's kernels, with a fallback to torch's own
implementation."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ...runtime.settings import check_settings
from ...runtime.signatures import public
from ...runtime.warn import warn
from .report import REASONS

_warned: set[str] = set()


@public("torch_fattn.sdpa", any_layout=True)
def sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`, argument for argument.

    Causal means the same as in torch: query row i sees the keys up to i, for any lengths. A row that sees no
    key is 0. Calls without a kernel run on torch's own implementation, with one warning per reason and
    process: dropout, nested and sparse tensors, more than four dimensions, devices other than "mps", other
    dtypes, head sizes above 576, or 256 with gradients (`report` counts them). Calls that torch is expected
    to run faster also go there, without a warning, as do calls with gradients for which torch keeps little
    memory (`training` of `install`). Head sizes that are not multiples of 8 are padded. torch raises its own
    errors for calls that it refuses.

    The result has the order of the query's memory: if the query is a view of `[B, L, H * D]`,
    `out.transpose(1, 2).flatten(2)` copies nothing.
    """
    if torch.compiler.is_compiling():
        return torch.ops.fattn.sdpa(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    check_settings()
    # A subclass may override torch's function, recognised by identity.
    operands = (query, key, value) if attn_mask is None else (query, key, value, attn_mask)
    if any(type(tensor) is not Tensor and type(tensor) is not torch.nn.Parameter for tensor in operands):
        if not torch.ops.fattn._is_installed():  # otherwise torch's function is ours and counts the call
            reason = "nested" if getattr(query, "is_nested", False) else "subclass"
            torch.ops.fattn._count_fallback(reason, ", ".join(type(t).__name__ for t in operands))
            _warn(reason)
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    try:
        out, number = torch.ops.fattn._sdpa_and_reason(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    except RuntimeError:
        _refuse_shared_heads(query, key, value, enable_gqa)
        raise
    if number:
        _warn(torch.ops.fattn._reason_name(number))
    return out


def has_kernel(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None, enable_gqa: bool
) -> bool:
    """Whether a call has kernels here, even where torch is faster: torch also beats ComfyUI's slices. True in
    a compiled graph, which cannot choose."""
    if torch.compiler.is_compiling():
        return True
    check_settings()
    arguments = (query, key, value, mask, 0.0, False)
    reason = torch.ops.fattn._sdpa_reason(*arguments, scale=scale, enable_gqa=enable_gqa)
    return torch.ops.fattn._reason_name(reason) in ("none", "torch_is_faster")


def _refuse_shared_heads(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> None:
    """Advises enable_gqa, where torch's own error is about broadcasting."""
    if enable_gqa or min(query.dim(), key.dim(), value.dim()) < 3:
        return
    heads, kv_heads = query.shape[-3], key.shape[-3]
    if kv_heads == value.shape[-3] and 1 < kv_heads < heads and heads % kv_heads == 0:
        raise ValueError(
            f"torch_fattn.sdpa: {heads} query heads share {kv_heads} key-value heads; pass enable_gqa=True"
        ) from None


def _warn(reason: str) -> None:
    if reason in _warned or reason in ("torch_is_faster", "small_training"):
        return
    _warned.add(reason)
    warn(f"torch_fattn.sdpa: {REASONS[reason]}; torch's own scaled_dot_product_attention is used")
