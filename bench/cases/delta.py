"""Linear attention: operands, least bytes, and float64 results of the gated delta rule and of a step of its
layer. A call's kv_heads are the key heads, its q_heads the value heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from .calls import Call

Buffers = dict[str, Tensor]

TAPS = 4
STATES = ("state", "conv_state")  # replaced in place
_EPS = 1e-6  # of all norms


def operands(call: Call, device: str | torch.device, seed: int) -> Buffers:
    """Random operands by argument name. A rule gets queries and keys of length 1, and decays that the dtype
    holds, as some peers take them."""
    is_meta = torch.device(device).type == "meta"
    generator = None if is_meta else torch.Generator(device).manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = call.torch_dtype) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    def uniform(low: float, *shape: int) -> Tensor:
        numbers = torch.rand(shape, generator=generator, device=device)
        return (low + (1 - low) * numbers).to(call.torch_dtype)

    dim, heads, exact = call.head_dim, call.q_heads, torch.float32
    tokens = (call.batch, call.q_len)
    columns = (dim,) if call.channel_decay else ()
    query, key = (normal(*tokens, call.kv_heads, dim) for _ in range(2))
    value = normal(*tokens, heads, dim)
    state = normal(call.batch, heads, dim, dim, dtype=exact) * call.scale
    if call.op == "gated_delta_rule":
        query, key = (F.normalize(x.float(), dim=-1).to(call.torch_dtype) for x in (query, key))
        g, beta = uniform(0.9, *tokens, heads, *columns).float().log(), uniform(0, *tokens, heads)
        return {"query": query, "key": key, "value": value, "g": g, "beta": beta, "state": state}
    channels = (2 * call.kv_heads + heads) * dim
    return {
        **{"query": query, "key": key, "value": value, "z": normal(*tokens, heads, dim)},
        **{"a": normal(*tokens, heads, *columns), "b": normal(*tokens, heads)},
        **{"A_log": normal(heads, dtype=exact) - 2, "dt_bias": normal(heads, *columns, dtype=exact)},
        **{"conv_weight": normal(channels, TAPS), "norm_weight": normal(dim)},
        **{"conv_state": normal(call.batch, channels, TAPS), "state": state},
    }


def least_bytes(call: Call) -> int:
    """Every operand and the result once, and the states once more."""
    made = operands(call, "meta", 0)
    written = (made[name] for name in ("value", *STATES) if name in made)  # the result has the value's shape
    return sum(one.nbytes for one in (*made.values(), *written))


# ---- operands that the peers take --------------------------------------------------------------------------


def _tiled(call: Call, heads: Tensor, dim: int = 2) -> Tensor:
    """Orders value heads as llama.cpp does: head h has key head h % kv_heads."""
    return (
        heads.unflatten(dim, (call.kv_heads, -1)).transpose(dim, dim + 1).flatten(dim, dim + 1).contiguous()
    )


def _untiled(call: Call, heads: Tensor, dim: int = 2) -> Tensor:
    return heads.unflatten(dim, (-1, call.kv_heads)).transpose(dim, dim + 1).flatten(dim, dim + 1)


def _of_state(call: Call, buffers: Buffers) -> Tensor:
    return torch.full_like(buffers["state"], math.nan)


DERIVED: dict[str, Callable[[Call, Buffers], Tensor]] = {
    "scaled_query": lambda call, buffers: buffers["query"] * call.scale,
    "decay": lambda call, buffers: buffers["g"].exp().to(call.torch_dtype),
    "transposed_initial_state": lambda call, buffers: buffers["state"].mT.contiguous(),
    "transposed_state": _of_state,
    "key_float32": lambda call, buffers: buffers["key"].float(),
    "tiled_value": lambda call, buffers: _tiled(call, buffers["value"].float()),
    "tiled_g": lambda call, buffers: _tiled(call, buffers["g"]),
    "tiled_beta": lambda call, buffers: _tiled(call, buffers["beta"].float()),
    "tiled_initial_state": lambda call, buffers: _tiled(call, buffers["state"].mT, 1),
    "tiled_out": lambda call, buffers: buffers["out"].float(),
    "tiled_state": _of_state,
}


# ---- results -----------------------------------------------------------------------------------------------


def _found(call: Call, buffers: Buffers) -> Buffers:
    """The results as our kernels write them."""
    found = {name: buffers[name] for name in ("out", *STATES) if name in buffers}
    if "tiled_out" in buffers:
        found["out"] = _untiled(call, buffers["tiled_out"])
        found["state"] = _untiled(call, buffers["tiled_state"], 1).mT
    elif "transposed_state" in buffers:
        found["state"] = buffers["transposed_state"].mT
    return found


def errors(
    call: Call, buffers: Buffers, chosen: Collection[tuple[int, int]], device: str
) -> tuple[float, float]:
    """The largest errors of the result and of the states, of the chosen sequences and value heads."""
    found = _found(call, buffers)
    if any(one.isnan().any() for one in found.values()):
        return math.inf, math.inf
    batch, head = (torch.tensor(numbers, device=device) for numbers in zip(*chosen, strict=True))
    made = {name: one.to(device) for name, one in buffers.items()}
    exact = {}
    if call.op == "gated_delta_step":
        made, exact["conv_state"] = _convolved(call, made)
    key_head = head // call.group_size
    query, key = (made[name][batch, :, key_head].double() for name in ("query", "key"))
    value, g, beta = (made[name][batch, :, head].double() for name in ("value", "g", "beta"))
    exact["out"], exact["state"] = _rule(
        query * call.scale, key, value, g, beta, made["initial_state"][batch, head].double()
    )
    if call.op == "gated_delta_step":
        normed = F.rms_norm(exact["out"], (call.head_dim,), made["norm_weight"].double(), _EPS)
        exact["out"] = normed * F.silu(made["z"][batch, :, head].double())
    largest = relative = 0.0
    for name, expected in exact.items():
        mine = found[name].to(device)
        if name != "conv_state":
            mine = mine[batch, :, head] if name == "out" else mine[batch, head]
        error = mine.double() - expected
        largest = max(largest, error.abs().max().item())
        relative = max(relative, (error.norm() / expected.norm()).item())
    return largest, relative


def _rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The result and the last state of sequences `[n, T, D]`, token by token."""
    out = torch.empty_like(value)
    decay = g.exp().view(*g.shape[:2], -1, 1)
    for t in range(value.shape[1]):
        state = state * decay[:, t]
        row = key[:, t, None]
        update = beta[:, t, None, None] * (value[:, t, None] - row @ state)
        state = state + row.mT @ update
        out[:, t] = (query[:, t, None] @ state)[:, 0]
    return out, state


def _convolved(call: Call, made: Buffers) -> tuple[Buffers, Tensor]:
    """The operands of the rule in a step, and the new state of the convolution."""
    exact = {name: one.double() for name, one in made.items() if one.is_floating_point()}
    rows = torch.cat([exact[name].flatten(2) for name in ("query", "key", "value")], -1).mT
    past = torch.cat((exact["initial_conv_state"], rows), -1)
    windows = past[..., 1:].unfold(-1, TAPS, 1)
    mixed = F.silu((windows * exact["conv_weight"][:, None]).sum(-1)).mT.unflatten(-1, (-1, call.head_dim))
    query, key, value = mixed.split((call.kv_heads, call.kv_heads, call.q_heads), 2)
    query, key = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPS) for x in (query, key))
    factor = exact["A_log"].exp().view(-1, *[1] * (exact["a"].dim() - 3))
    g = -factor * F.softplus(exact["a"] + exact["dt_bias"])
    rule = {"query": query, "key": key, "value": value, "g": g, "beta": exact["b"].sigmoid()}
    return made | rule, past[..., -TAPS:]
