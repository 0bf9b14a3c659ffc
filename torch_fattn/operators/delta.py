"""Linear attention as Python functions, documented. All work is in `torch.ops.fattn`."""

from __future__ import annotations

import torch
from torch import Tensor

from ..runtime.signatures import public

__all__ = ["causal_conv1d", "gated_delta_rule", "gated_delta_step"]


@public("fattn.gated_delta_rule")
def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor | None = None,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    slots: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    writes_state: bool = True,
) -> Tensor:
    """The gated delta rule over tokens `[B, T, heads, columns]`, in order. For each sequence and value head,
    with a state S `[Dk, Dv]`:

        S = exp(g) S;  S = S + k^T beta (v - k S);  out = scale q S

    A decay per head is that of gated delta nets (Qwen3-Next), one per channel that of Kimi delta attention.
    Everything is computed in float32, in chunks of 8 tokens, so that a call of any tokens and calls of pieces
    whose lengths are multiples of 8 have the same bits. A sequence does not depend on others.

    Args:
        query: `[B, T, Hk, Dk]`, float32, float16 or bfloat16, of any strides; Dk a multiple of 8 up to 256.
            An operand is copied only if its columns are apart, or if it shares memory with the state.
        key: of the shape and dtype of query.
        value: `[B, T, Hv, Dv]`, where Hv is a multiple of Hk: value head h has key head `h // (Hv // Hk)`. Or
            `[B, T, Hk, Hv // Hk, Dv]`, for views of interleaved projections; g and beta are split likewise.
        g: log of the decay, `[B, T, Hv]`, or `[B, T, Hv, Dk]` for a decay per channel, which needs Hk = Hv;
            float32 or the dtype of query. -inf clears the state.
        beta: `[B, T, Hv]`, float32 or the dtype of query.
        state: `[states, Hv, Dk, Dv]`, float32, updated in place; the last three dimensions contiguous.
            Default: the sequences begin with zeros, and their states are dropped.
        A_log: `[Hv]`, float32. With it, g and beta are the projections a and b, and the kernel computes
            `g = -exp(A_log) softplus(a + dt_bias)` and `beta = sigmoid(b)`.
        dt_bias: `[Hv]`, or `[Hv, Dk]` for a decay per channel; float32. With A_log, or neither.
        has_initial_state: bool `[sequences]`. A sequence with False begins with zeros.
        slots: int32 `[sequences]`, the state of each sequence; -1 skips the sequence, whose result is 0. Two
            sequences must not share a state. Default: sequence n has state n.
        cu_seqlens: int32 `[sequences + 1]`, where the sequences of a packed batch (B = 1) begin and end.
        scale: factor of the query. Default `Dk ** -0.5`.
        use_qk_l2norm_in_kernel: normalises each query and key to length 1.
        writes_state: False leaves the state as it is.

    Returns:
        `[B, T, Hv, Dv]`, contiguous, in the dtype of query.

    Raises:
        TypeError: dtypes; no tensor.
        ValueError: shapes, devices, a state whose elements share memory; more than 2^20 tokens.
        NotImplementedError: more than 256 columns.
        RuntimeError: gradients, in the backward.
    """
    return torch.ops.fattn.gated_delta_rule(
        query,
        key,
        value,
        g,
        beta,
        state,
        A_log=A_log,
        dt_bias=dt_bias,
        has_initial_state=has_initial_state,
        slots=slots,
        cu_seqlens=cu_seqlens,
        scale=scale,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        writes_state=writes_state,
    )


@public("fattn.gated_delta_step")
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
    *,
    slots: Tensor | None = None,
    counts: Tensor | None = None,
    gate: str = "silu",
    eps: float = 1e-6,
    scale: float | None = None,
    writes_state: bool = True,
) -> Tensor:
    """A decode step of a layer of linear attention, for 1 to 16 tokens per sequence, in one launch:
    `causal_conv1d` with silu, `gated_delta_rule` with normalised queries and keys and raw gates, and the
    gated RMSNorm of its result. On a GPU, several tokens at once have the bits of calls of one.

    Args:
        query: `[B, T, Hk, Dk]` before the convolution, such as a view of a projection; like key, value, a and
            b as in `gated_delta_rule` with A_log, of any strides.
        key: `[B, T, Hk, Dk]`.
        value: `[B, T, Hv, Dv]`, or with its heads split `[B, T, Hk, Hv // Hk, Dv]`; so are z, a and b.
        z: gate of the norm, of the shape and dtype of value.
        a: `[B, T, Hv]`, or `[B, T, Hv, Dk]` for a decay per channel.
        b: `[B, T, Hv]`.
        A_log: `[Hv]`, float32.
        dt_bias: `[Hv]` or `[Hv, Dk]`, float32.
        conv_weight: `[2 Hk Dk + Hv Dv, W]`, the channels of query, key and value; 2 to 8 taps.
        conv_bias: `[2 Hk Dk + Hv Dv]` or None.
        norm_weight: `[Dv]`.
        conv_state: `[states, 2 Hk Dk + Hv Dv, W - 1 or more]` in the dtype of query; the last columns are the
            newest. Updated in place, as `state` is.
        state: `[states, Hv, Dk, Dv]`, float32.
        slots: int32 `[B]`, the states of each sequence; -1 skips the sequence, whose result is 0.
        counts: int32 `[B]`, tokens of each sequence, from 0 to T; the result of the others is 0.
        gate: activation of z, "silu" or "sigmoid".
        eps: of the norm.
        scale: factor of the query. Default `Dk ** -0.5`.
        writes_state: False leaves both states as they are, as for draft tokens.

    Returns:
        `[B, T, Hv, Dv]`, contiguous, in the dtype of query.

    Raises:
        TypeError: dtypes; no tensor.
        ValueError: shapes, devices, unknown names, states whose elements share memory.
        NotImplementedError: more than 256 columns or 16 tokens.
        RuntimeError: gradients, in the backward.
    """
    return torch.ops.fattn.gated_delta_step(
        query,
        key,
        value,
        z,
        a,
        b,
        A_log,
        dt_bias,
        conv_weight,
        conv_bias,
        norm_weight,
        conv_state,
        state,
        slots=slots,
        counts=counts,
        gate=gate,
        eps=eps,
        scale=scale,
        writes_state=writes_state,
    )


@public("fattn.causal_conv1d")
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    state: Tensor | None = None,
    *,
    has_initial_state: Tensor | None = None,
    slots: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    activation: str = "none",
) -> Tensor:
    """`out[t] = activation(bias + sum_w weight[w] x[t + w + 1 - W])` for each channel; tokens before the
    first are columns of the state, or 0. It is summed in float32, in the order of the taps.

    Args:
        x: `[B, T, C]`, float32, float16 or bfloat16, of any strides.
        weight: `[C, W]`, in the dtype of x or float32; W from 2 to 8.
        bias: `[C]` in the dtype of weight. Default: none.
        state: `[states, C, W - 1 or more]` in the dtype of x, the last columns the newest; updated in place.
            Default: zeros, dropped after the call.
        has_initial_state: bool `[sequences]`. A sequence with False begins with zeros.
        slots: int32 `[sequences]`, the state of each sequence; -1 skips the sequence, whose result is 0.
        cu_seqlens: int32 `[sequences + 1]`, where the sequences of a packed batch (B = 1) begin and end.
        activation: "none" or "silu".

    Returns:
        `[B, T, C]`, contiguous, in the dtype of x.

    Raises:
        TypeError: dtypes; no tensor.
        ValueError: shapes, devices, unknown names, a state whose elements share memory; over 2^20 tokens.
        NotImplementedError: other numbers of taps.
        RuntimeError: gradients, in the backward.
    """
    return torch.ops.fattn.causal_conv1d(
        x,
        weight,
        bias,
        state,
        has_initial_state=has_initial_state,
        slots=slots,
        cu_seqlens=cu_seqlens,
        activation=activation,
    )
