"""`gated_delta_rule` and `causal_conv1d` with states as results, as in fla and transformers. All work is in
`torch.ops.fattn`, whose operators write states in place."""

from __future__ import annotations

import torch
from torch import Tensor

from ..operators import delta
from ..operators.delta import gated_delta_step
from ..runtime.signatures import public

__all__ = ["causal_conv1d", "gated_delta_rule", "gated_delta_step"]

_NAMES = {"state": "initial_state"}  # in the operators' errors


@public("torch_fattn.linear_attention.gated_delta_rule", names=_NAMES)
def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    A_log: Tensor | None = None,  # noqa: N803
    dt_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`chunk_gated_delta_rule` of fla and transformers, and with g of rank 4 `chunk_kda` of fla.

    Args:
        query, key, value, g, beta, use_qk_l2norm_in_kernel, cu_seqlens, scale, A_log, dt_bias: as in
            `torch_fattn.gated_delta_rule`.
        initial_state: float32 `[N, Hv, Dk, Dv]`, not changed; N is B, or the number of packed sequences.
            Default: zeros.
        output_final_state: returns the states after the last tokens.

    Returns:
        out `[B, T, Hv, Dv]`, and the final state like initial_state, or None.

    Errors are those of `torch_fattn.gated_delta_rule`.
    """
    state, has_state = initial_state, None
    if output_final_state:
        size = (value.shape[2:-1].numel(), *query.shape[-1:], *value.shape[-1:])
        of = _sequences("gated_delta_rule", query, cu_seqlens, initial_state)
        state, has_state = _written(initial_state, query.new_empty((of, *size), dtype=torch.float32))
    out = delta.gated_delta_rule(
        *(query, key, value, g, beta, state),
        A_log=A_log,
        dt_bias=dt_bias,
        has_initial_state=has_state,
        cu_seqlens=cu_seqlens,
        scale=scale,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        writes_state=output_final_state,
    )
    return out, state if output_final_state else None


@public("torch_fattn.linear_attention.causal_conv1d", names=_NAMES)
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    activation: str | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`causal_conv1d` of fla: convolves each channel with its own weight.

    Args:
        x, weight, bias, cu_seqlens: as in `torch_fattn.causal_conv1d`. The weight of an `nn.Conv1d` is
            `weight[:, 0]`.
        initial_state: the tokens before the first, newest last, `[N, C, W - 1]` or more columns, in the dtype
            of x; not changed. Default: zeros.
        output_final_state: returns the newest tokens of each sequence.
        activation: None or "silu".

    Returns:
        a tensor like x, and the final state, like initial_state or `[N, C, W]`, or None.

    Errors are those of `torch_fattn.causal_conv1d`.
    """
    of = _sequences("causal_conv1d", x, cu_seqlens, initial_state)
    state, has_state = initial_state, None
    if output_final_state or state is not None:
        state, has_state = _written(state, x.new_empty(of, *x.shape[-1:], *weight.shape[-1:]))
    out = delta.causal_conv1d(
        *(x, weight, bias, state),
        has_initial_state=has_state,
        cu_seqlens=cu_seqlens,
        activation=activation or "none",
    )
    return out, state if output_final_state else None


def _sequences(name: str, first: Tensor, cu_seqlens: Tensor | None, initial: Tensor | None) -> int:
    count = first.shape[:1].numel() if cu_seqlens is None else max(cu_seqlens.numel() - 1, 0)
    if initial is not None and initial.shape[:1] != (count,):
        what = ("query" if name == "gated_delta_rule" else "x") if cu_seqlens is None else "cu_seqlens"
        raise ValueError(
            f"torch_fattn.linear_attention.{name}: initial_state has shape {list(initial.shape)} and {what} "
            f"{count} sequences; pass one for each"
        )
    return count


def _written(initial: Tensor | None, memory: Tensor) -> tuple[Tensor, Tensor | None]:
    """A state for an operator to write, and `has_initial_state`."""
    if initial is not None:
        return initial.clone(memory_format=torch.contiguous_format), None
    return memory, memory.new_zeros(memory.shape[0], dtype=torch.bool)
