"""Linear attention as Python functions, documented. All work is in `torch.ops.fattn`."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import Unpack

from ..runtime.signatures import public
from .options import CausalConv1dOptions, GatedDeltaRuleOptions, GatedDeltaStepOptions

__all__ = ["causal_conv1d", "gated_delta_rule", "gated_delta_step"]

MAX_STEP_LENGTH = 16  # tokens of each sequence in a gated_delta_step


@public("fattn.gated_delta_rule", options="gated_delta_rule")
def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor | None = None,
    **options: Unpack[GatedDeltaRuleOptions],
) -> Tensor:
    """The gated delta rule over the tokens of each sequence, in order. For each value head, with a state S
    `[Dk, Dv]`:

        S = exp(g) S;  S = S + k^T beta (v - k S);  out = scale q S

    A decay per head is that of gated delta nets (Qwen3-Next), one per channel that of Kimi delta attention.
    Everything is computed in float32, in chunks of 8 tokens: a call has the bits of calls of pieces whose
    lengths are multiples of 8. A sequence does not depend on others.

    Args:
        query, key: `[B, T, Hk, Dk]`, float32, float16 or bfloat16; Dk is a multiple of 8 up to 256. Any
            strides: an operand is copied only if its columns are apart, or if it shares memory with a state.
        value: `[B, T, Hv, Dv]`, Hv a multiple of Hk: value head h has key head `h // (Hv // Hk)`. Or
            `[B, T, Hk, Hv // Hk, Dv]`, as in views of interleaved projections; g and beta are split likewise.
        g: log of the decay, `[B, T, Hv]`, or `[B, T, Hv, Dk]` for a decay per channel, which needs Hk = Hv;
            float32 or the dtype of query. -inf clears the state.
        beta: `[B, T, Hv]`, float32 or the dtype of query.
        state: `[states, Hv, Dk, Dv]`, float32, updated in place; its last three dimensions are contiguous.
            Default: all sequences begin with zeros, and their states are dropped.

    Returns:
        `[B, T, Hv, Dv]`, contiguous, in the dtype of query.

    Raises:
        TypeError: dtypes; no tensor.
        ValueError: shapes, devices, a state whose elements share memory; more than 2^20 tokens.
        NotImplementedError: more than 256 columns.
        RuntimeError: gradients, in the backward.
    """
    return torch.ops.fattn.gated_delta_rule(query, key, value, g, beta, state, **options)


@public("fattn.gated_delta_step", options="gated_delta_step")
def gated_delta_step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    z: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    norm_weight: Tensor,
    conv_state: Tensor,
    state: Tensor,
    **options: Unpack[GatedDeltaStepOptions],
) -> Tensor:
    """A decode step of a layer of linear attention, for 1 to 16 tokens per sequence, in one launch:
    `causal_conv1d` with silu, `gated_delta_rule` with normalised queries and keys and raw gates, and the
    gated RMSNorm of its result. On a GPU, several tokens at once have the bits of calls of one.

    Args:
        query, key, value, a, b, A_log, dt_bias, state: as in `gated_delta_rule` with A_log; query, key and
            value before the convolution, such as views of projections.
        z: gate of the norm, of the shape and dtype of value.
        conv_weight, conv_bias: `[2 Hk Dk + Hv Dv, W]` and `[2 Hk Dk + Hv Dv]` or None, the channels of query,
            key and value; W from 2 to 8.
        norm_weight: `[Dv]`.
        conv_state: `[states, 2 Hk Dk + Hv Dv, W - 1 or more]` in the dtype of query; the last columns are the
            newest. Updated in place.

    Returns:
        `[B, T, Hv, Dv]`, contiguous, in the dtype of query.

    Raises:
        TypeError: dtypes; no tensor.
        ValueError: shapes, devices, unknown names, states whose elements share memory.
        NotImplementedError: more than 256 columns or 16 tokens.
        RuntimeError: gradients, in the backward.
    """
    projections, parameters = (
        (query, key, value, z, a, b),
        (A_log, dt_bias, conv_weight, conv_bias, norm_weight),
    )
    return torch.ops.fattn.gated_delta_step(*projections, *parameters, conv_state, state, **options)


@public("fattn.causal_conv1d", options="causal_conv1d")
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    state: Tensor | None = None,
    **options: Unpack[CausalConv1dOptions],
) -> Tensor:
    """`out[t] = activation(bias + sum_w weight[w] x[t + w + 1 - W])` for each channel; tokens before the
    first are columns of the state, or 0. It is summed in float32, in the order of the taps.

    Args:
        x: `[B, T, C]`, float32, float16 or bfloat16, of any strides.
        weight, bias: `[C, W]` and `[C]`, in the dtype of x or float32; W from 2 to 8. Default: no bias.
        state: `[states, C, W - 1 or more]` in the dtype of x, the last columns the newest; updated in place.
            Default: zeros, dropped after the call.

    Returns:
        `[B, T, C]`, contiguous, in the dtype of x.

    Raises:
        TypeError: dtypes; no tensor.
        ValueError: shapes, devices, unknown names, a state whose elements share memory; over 2^20 tokens.
        NotImplementedError: other numbers of taps.
        RuntimeError: gradients, in the backward.
    """
    return torch.ops.fattn.causal_conv1d(x, weight, bias, state, **options)
