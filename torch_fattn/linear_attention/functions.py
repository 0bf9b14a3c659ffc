"""`gated_delta_rule` and `causal_conv1d` with states as results, as in fla and transformers. All work is in
`torch.ops.fattn`, whose operators write states in place."""

from __future__ import annotations

import torch
from torch import Tensor

from ..operators import delta
from ..operators.delta import gated_delta_step
from ..runtime.signatures import public

__all__ = ["causal_conv1d", "gated_delta_rule", "gated_delta_step"]

_NAMES = {  # in the operators' errors
    " without slots": " in the batch or cu_seqlens",
    "the slots of the sequences, or a state": "one",
    "state": "initial_state",
}


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
    state = initial_state
    if output_final_state:
        sizes = (value.shape[2:-1].numel(), *query.shape[-1:], *value.shape[-1:])
        state = _to_write(initial_state, query, cu_seqlens, sizes, torch.float32)
    out = delta.gated_delta_rule(
        *(query, key, value, g, beta, state),
        A_log=A_log,
        dt_bias=dt_bias,
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
    state = initial_state
    if output_final_state or state is not None:
        state = _to_write(state, x, cu_seqlens, (*x.shape[-1:], *weight.shape[-1:]), x.dtype)
    out = delta.causal_conv1d(
        *(x, weight, bias, state), cu_seqlens=cu_seqlens, activation=activation or "none"
    )
    return out, state if output_final_state else None


def _to_write(
    initial: Tensor | None, x: Tensor, cu_seqlens: Tensor | None, sizes: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    if initial is not None:
        return initial.clone(memory_format=torch.contiguous_format)
    sequences = x.shape[:1].numel() if cu_seqlens is None else max(cu_seqlens.numel() - 1, 0)
    return x.new_zeros((sequences, *sizes), dtype=dtype)
