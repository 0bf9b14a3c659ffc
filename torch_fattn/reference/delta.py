"""Linear attention in float64: `gated_delta_rule`, `gated_delta_step` and `causal_conv1d`, token by token."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import Unpack

from ..operators.options import (
    CausalConv1dOptions,
    GatedDeltaRuleOptions,
    GatedDeltaStepOptions,
    SequenceOptions,
)
from ..runtime.options import with_defaults
from ..runtime.signatures import check_writable, public

__all__ = ["causal_conv1d", "gated_delta_rule", "gated_delta_step"]


@public("torch_fattn.reference.gated_delta_rule", options="gated_delta_rule", refused_by="gated_delta_rule")
def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor | None = None,
    **options: Unpack[GatedDeltaRuleOptions],
) -> Tensor:
    """The result. `state` may be float64, and is written in its dtype."""
    every = with_defaults("gated_delta_rule", options)
    scale, writes_state = every["scale"], every["writes_state"]
    if state is not None and writes_state:
        check_writable("torch_fattn.reference.gated_delta_rule", state=state)
    q, k, v, g, beta = map(_exact, (query, key, value, g, beta))
    heads = v.shape[2] * (v.shape[3] if v.dim() == 5 else 1)
    tokens = v.shape[:2]
    g = g.reshape(*tokens, heads, q.shape[-1] if g.dim() == v.dim() else 1)
    v, beta = v.reshape(*tokens, heads, v.shape[-1]), beta.reshape(*tokens, heads, 1)
    if every["A_log"] is not None and every["dt_bias"] is not None:
        bias = _exact(every["dt_bias"]).reshape(heads, g.shape[-1])
        g = -_exact(every["A_log"]).exp()[:, None] * F.softplus(g + bias, threshold=1e9)
        beta = beta.sigmoid()
    if every["use_qk_l2norm_in_kernel"]:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q = q * (q.shape[-1] ** -0.5 if scale is None else float(scale))
    q, k = (x.repeat_interleave(heads // max(x.shape[2], 1), 2) for x in (q, k))

    out = torch.zeros_like(v)
    for at, own, s in _sequences(query, state, (heads, q.shape[-1], v.shape[-1]), every):
        for q_, k_, v_, g_, beta_, out_ in zip(*(x[at] for x in (q, k, v, g, beta, out)), strict=True):
            s = s * g_.exp()[..., None]
            delta = beta_ * (v_ - (k_[..., None] * s).sum(-2))
            s = s + k_[..., None] * delta[:, None]
            out_.copy_((q_[..., None] * s).sum(-2))
        if own is not None and writes_state:
            own.copy_(s)
    return out


@public("torch_fattn.reference.causal_conv1d", options="causal_conv1d", refused_by="causal_conv1d")
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    state: Tensor | None = None,
    **options: Unpack[CausalConv1dOptions],
) -> Tensor:
    """The result. Writes the state."""
    every = with_defaults("causal_conv1d", options)
    if state is not None:
        check_writable("torch_fattn.reference.causal_conv1d", state=state)
    taps = weight.shape[1]
    out = torch.zeros(x.shape, dtype=torch.float64, device="cpu")
    columns = taps - 1 if state is None else state.shape[2]
    for at, own, before in _sequences(x, state, (x.shape[2], columns), every):
        rows = _exact(x[at]).T
        whole = torch.cat((before, rows), 1)
        sums = torch.zeros_like(rows) if bias is None else _exact(bias)[:, None].expand_as(rows)
        for tap in range(taps):
            first = columns + 1 - taps + tap
            sums = sums + _exact(weight)[:, tap, None] * whole[:, first : first + rows.shape[1]]
        out[at] = (F.silu(sums) if every["activation"] == "silu" else sums).T
        if own is not None:
            own.copy_(whole[:, whole.shape[1] - columns :])
    return out


@public("torch_fattn.reference.gated_delta_step", options="gated_delta_step", refused_by="gated_delta_step")
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
    """The result. Nothing is rounded between the parts of the step."""
    every = with_defaults("gated_delta_step", options)
    slots, counts = every["slots"], every["counts"]
    name, new = "torch_fattn.reference.gated_delta_step", every["conv_state_out"]
    written = conv_state if new is None else new
    check_writable(name, **{"conv_state" if new is None else "conv_state_out": written, "state": state})
    batch, length, keys = query.flatten(2).shape
    x = torch.cat([_exact(each).flatten(2) for each in (query, key, value)], -1)
    out = torch.zeros(batch, length, *state.shape[1::2], dtype=torch.float64, device="cpu")
    for n in range(batch):
        at = n if slots is None else int(slots[n])
        count = length if counts is None else int(counts[n])
        if count == 0 or not 0 <= at < len(state):
            continue
        part = slice(n, n + 1), slice(count)
        states = conv_state[at][None].clone(), state[at][None].clone()
        mixed = causal_conv1d(x[part], conv_weight, conv_bias, states[0], activation="silu")
        parts = zip(mixed.tensor_split((keys, 2 * keys), -1), (query, key, value), strict=True)
        q, k, v = (rows.unflatten(-1, like.shape[2:]) for rows, like in parts)
        result = gated_delta_rule(
            *(q, k, v, a[part], b[part], states[1]),
            A_log=A_log,
            dt_bias=dt_bias,
            scale=every["scale"],
            use_qk_l2norm_in_kernel=True,
        )
        squares = result.square().mean(-1, keepdim=True)
        if every["writes_state"]:
            written[at], state[at] = states[0][0], states[1][0]
        normed = result * torch.rsqrt(squares + float(every["eps"])) * _exact(norm_weight)
        of_gate = _exact(z)[part].reshape(normed.shape)
        out[part] = normed * of_gate.sigmoid() * (of_gate if every["gate"] == "silu" else 1)
    return out


def _exact(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().double()


def _sequences(
    first: Tensor, states: Tensor | None, sizes: tuple[int, ...], options: SequenceOptions
) -> Iterator[tuple[tuple[int, slice], Tensor | None, Tensor]]:
    """Where the tokens of each sequence that is not skipped are in `first` `[batch, length, ..]`, its state,
    and the numbers of these sizes before its first token."""
    cu_seqlens, slots, initial = (options[n] for n in ("cu_seqlens", "slots", "has_initial_state"))
    ends = None if cu_seqlens is None else cu_seqlens.tolist()
    for n in range(first.shape[0] if ends is None else len(ends) - 1):
        at = (n, slice(first.shape[1])) if ends is None else (0, slice(ends[n], ends[n + 1]))
        slot = n if slots is None else int(slots[n])
        if states is None or 0 <= slot < len(states):
            own = None if states is None else states[slot]
            if own is None or (initial is not None and not initial[n]):
                yield at, own, torch.zeros(sizes, dtype=torch.float64, device="cpu")
            else:
                yield at, own, _exact(own)
