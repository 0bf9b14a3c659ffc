"""Linear attention: operands, least bytes, and float64 results of the gated delta rule and of a step of its
layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

Buffers = dict[str, Tensor]

TAPS = 4
STATE, NEW = "state", "conv_state_out"  # replaced in place; written
_EPS = 1e-6  # of all norms


def operands(
    tokens: tuple[int, int],  # sequences, and tokens of each
    key_heads: int,
    heads: int,
    dim: int,
    dtype: torch.dtype,
    device: str | torch.device,
    seed: int,
    *,
    is_step: bool,
    channel_decay: bool,
) -> Buffers:
    """Random operands by argument name. A rule gets queries and keys of length 1, and decays that the dtype
    holds, as MLX takes them."""
    is_meta = torch.device(device).type == "meta"
    generator = None if is_meta else torch.Generator(device).manual_seed(seed)

    def draw(*shape: int, of: Callable[..., Tensor] = torch.randn) -> Tensor:
        return of(shape, generator=generator, device=device)

    columns = (dim,) if channel_decay else ()
    query, key = (draw(*tokens, key_heads, dim) for _ in range(2))
    value, state = draw(*tokens, heads, dim).to(dtype), dim**-0.5 * draw(tokens[0], heads, dim, dim)
    if not is_step:
        query, key = (F.normalize(x, dim=-1).to(dtype) for x in (query, key))
        g = (1 - 0.1 * draw(*tokens, heads, *columns, of=torch.rand)).to(dtype).float().log()
        beta = draw(*tokens, heads, of=torch.rand).to(dtype)
        return {"query": query, "key": key, "value": value, "g": g, "beta": beta, "state": state}
    channels = (2 * key_heads + heads) * dim
    parts = {"query": query, "key": key, "value": value, "z": draw(*tokens, heads, dim)}
    parts |= {"a": draw(*tokens, heads, *columns), "b": draw(*tokens, heads)}
    weights = {"conv_weight": draw(channels, TAPS), "norm_weight": draw(dim)}
    weights["conv_state"] = draw(tokens[0], channels, TAPS)
    weights[NEW] = torch.full_like(weights["conv_state"], math.nan)
    exact = {"A_log": draw(heads) - 2, "dt_bias": draw(heads, *columns)}
    parts, weights = ({name: one.to(dtype) for name, one in some.items()} for some in (parts, weights))
    return {**parts, **exact, **weights, "state": state}


def least_bytes(made: Buffers) -> int:
    """Every operand and the result once, and the states once more."""
    written = made["value"], made[STATE]  # the result has the value's shape
    return sum(one.nbytes for one in (*made.values(), *written))


DERIVED: dict[str, Callable[[object, Buffers], Tensor]] = {
    "scaled_query": lambda call, made: made["query"] * made["query"].shape[-1] ** -0.5,
    "decay": lambda call, made: made["g"].exp().to(made["query"].dtype),
    "transposed_initial_state": lambda call, made: made["state"].mT.contiguous(),
    "transposed_state": lambda call, made: torch.full_like(made["state"], math.nan),
}


def compared(
    buffers: Buffers, chosen: Collection[tuple[int, int]], device: str
) -> Iterator[tuple[Tensor, Tensor]]:
    """The result and the states, of the chosen sequences and value heads unless they have a NaN, each with
    the exact one."""
    made = {name: one.to(device) for name, one in buffers.items()}
    found = {name: made[name] for name in ("out", STATE, NEW) if name in made}
    if "transposed_state" in made:
        found["state"] = made["transposed_state"].mT
    batch, head = (torch.tensor(numbers, device=device) for numbers in zip(*chosen, strict=True))
    key_heads, heads = made["query"].shape[2], made["value"].shape[2]
    key_head, exact = head // (heads // key_heads), {}
    if "out_float32" in made:  # llama.cpp's, with another order of heads
        found["out"], key_head = made["out_float32"], head % key_heads
    if "conv_state" in made:
        made, exact[NEW] = _convolved(made)
    query, key = (made[name][batch, :, key_head].double() for name in ("query", "key"))
    value, g, beta = (made[name][batch, :, head].double() for name in ("value", "g", "beta"))
    state = made["initial_state"][batch, head].double()
    exact["out"], exact["state"] = _rule(query * query.shape[-1] ** -0.5, key, value, g, beta, state)
    if "conv_state" in made:
        normed = F.rms_norm(exact["out"], exact["out"].shape[-1:], made["norm_weight"].double(), _EPS)
        exact["out"] = normed * F.silu(made["z"][batch, :, head].double())
    for name, mine in found.items():
        if name != NEW and not mine.isnan().any():
            mine = mine[batch, :, head] if name == "out" else mine[batch, head]
        yield mine, exact[name]


def _rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The result and the last state of sequences `[n, T, D]`."""
    results = []
    made = (each.unbind(1) for each in (query, key, value, g.view(*g.shape[:2], -1, 1), beta[..., None]))
    for q, k, v, decay, b in zip(*made, strict=True):
        state = decay.exp() * state
        state = state + k[..., None] * (b * (v - (k[..., None] * state).sum(1)))[:, None]
        results.append((q[..., None] * state).sum(1))
    return torch.stack(results, 1), state


def _convolved(made: Buffers) -> tuple[Buffers, Tensor]:
    """The operands of the rule in a step, and the new state of the convolution."""
    exact = {name: one.double() for name, one in made.items() if one.is_floating_point()}
    rows = torch.cat([exact[name].flatten(2) for name in ("query", "key", "value")], -1).mT
    past = torch.cat((exact["conv_state"], rows), -1)
    windows = past[..., 1:].unfold(-1, TAPS, 1)
    mixed = F.silu((windows * exact["conv_weight"][:, None]).sum(-1)).mT.unflatten(
        -1, (-1, exact["query"].shape[-1])
    )
    query, key, value = mixed.split([exact[name].shape[2] for name in ("query", "key", "value")], 2)
    query, key = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPS) for x in (query, key))
    factor = exact["A_log"].exp().view(-1, *[1] * (exact["a"].dim() - 3))
    g = -factor * F.softplus(exact["a"] + exact["dt_bias"])
    rule = {"query": query, "key": key, "value": value, "g": g, "beta": exact["b"].sigmoid()}
    return made | rule, past[..., -TAPS:]
