"""The gradients of the prefills in float64: torch's autograd over `attention.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from ..operators.backward import Gradients
from ..operators.options import PrefillOptions, VarlenPrefillOptions
from ..runtime.signatures import public
from .attention import differentiable_prefill, differentiable_varlen_prefill


@public("torch_fattn.reference.prefill_backward", options="prefill_backward", refused_by="prefill_backward")
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
    """The gradients of query, key, value, sinks and alibi_slopes; None for the last two if absent. `out` and
    `lse` are recomputed."""
    return _gradients(differentiable_prefill, (query, key, value), (attn_mask,), options, grad_out, grad_lse)


@public(
    "torch_fattn.reference.varlen_prefill_backward",
    options="varlen_prefill_backward",
    refused_by="varlen_prefill_backward",
)
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
    """`prefill_backward` of packed sequences. Rows and keys of no sequence have gradient 0."""
    forward, packing = differentiable_varlen_prefill, (cu_seqlens_q, cu_seqlens_k)
    return _gradients(forward, (query, key, value), packing, options, grad_out, grad_lse)


def _gradients(
    forward: Callable[..., tuple[Tensor, Tensor]],
    operands: tuple[Tensor, ...],
    others: tuple[Tensor | None, ...],
    options: Any,
    grad_out: Tensor,
    grad_lse: Tensor | None,
) -> Gradients:
    parameters = {name: options[name] for name in ("sinks", "alibi_slopes") if options.get(name) is not None}
    with torch.inference_mode(False), torch.enable_grad():
        leaves = [_leaf(operand) for operand in operands]
        own = {name: _leaf(parameter) for name, parameter in parameters.items()}
        results = forward(*leaves, *others, **{**options, **own})
    received = (grad_out, torch.zeros_like(results[1]) if grad_lse is None else grad_lse)
    query, key, value, *of_parameters = torch.autograd.grad(
        [result for result in results if result.requires_grad],
        [*leaves, *own.values()],
        [
            each.detach().cpu().double()
            for each, result in zip(received, results, strict=True)
            if result.requires_grad
        ],
        allow_unused=True,
        materialize_grads=True,
    )
    named = dict(zip(own, of_parameters, strict=True))
    return query, key, value, named.get("sinks"), named.get("alibi_slopes")


def _leaf(operand: Tensor) -> Tensor:
    return operand.detach().cpu().double().clone().requires_grad_()
