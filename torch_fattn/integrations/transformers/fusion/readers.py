"""What the operators of linear attention read from a layer, by family of layers.

`FAMILIES` finds a layer's family by the source of its methods. A new family is a reader and a line there:
`torch_fattn.integrations.transformers.report` names the source that it does not know.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Operands(NamedTuple):
    """Heads of values are one axis of z, a and b, or two: key heads and the value heads of each."""

    rows: tuple[Tensor, ...]  # before the convolution: query, key and value, or one that they are columns of
    z: Tensor  # the gate of the norm, [B, T, heads.., value columns]
    a: Tensor  # [B, T, heads..], of KDA [B, T, heads, key columns]
    b: Tensor
    gates: tuple[Tensor, Tensor] | None  # A_log and dt_bias; None: a is the log of the decay, and b is beta


Reader = Callable[[Any, Tensor, bool], Operands]


class Family(NamedTuple):
    """`read(layer, x, in_place)` projects the input x. Rows are contiguous unless they may be `in_place`."""

    read: Reader
    sizes: Callable[[Any], tuple[int, int, int, int]]  # key heads, value heads, columns of keys and of values
    norm: str  # names of modules
    projection: str


def _qwen3_next(layer: Any, x: Tensor, in_place: bool) -> Operands:
    """The projections have query, key, value and gate of one key head after another."""
    keys, values, columns, value_columns = _GDN(layer)
    groups = values // keys
    widths = [columns, columns, groups * value_columns, groups * value_columns]
    qkvz, ba = layer.in_proj_qkvz(x), layer.in_proj_ba(x).unflatten(-1, (keys, 2, groups))
    if in_place:
        *rows, z = qkvz.unflatten(-1, (keys, -1)).split(widths, -1)
    else:
        apart = qkvz.index_select(-1, _apart(keys, tuple(widths), x.device))
        *rows, z = apart.split([apart.shape[-1] - values * value_columns, values * value_columns], -1)
    z = z.unflatten(-1, (groups, value_columns) if in_place else (keys, groups, value_columns))
    return Operands(tuple(rows), z, ba[..., 1, :], ba[..., 0, :], (layer.A_log, layer.dt_bias))


@functools.cache
def _apart(heads: int, widths: tuple[int, ...], device: torch.device) -> Tensor:
    """The columns of `heads` times `widths` in the order of all heads of the first width, then the second."""
    columns = torch.arange(heads * sum(widths), device="cpu").view(heads, -1).split(widths, -1)
    return torch.cat([each.flatten() for each in columns]).to(device)


def _qwen3_5(layer: Any, x: Tensor, in_place: bool) -> Operands:
    z = layer.in_proj_z(x).unflatten(-1, (-1, layer.head_v_dim))
    b, a = layer.in_proj_b(x), layer.in_proj_a(x)
    return Operands((layer.in_proj_qkv(x),), z, a, b, (layer.A_log, layer.dt_bias))


def _olmo_hybrid(layer: Any, x: Tensor, in_place: bool) -> Operands:
    z = layer.g_proj(x).unflatten(-1, (-1, layer.head_v_dim))
    a, b = layer.a_proj(x), layer.b_proj(x)
    if not layer.allow_neg_eigval:
        return Operands(_three(layer, x), z, a, b, (layer.A_log, layer.dt_bias))
    decay = -layer.A_log.float().exp() * nn.functional.softplus(a.float() + layer.dt_bias)
    return Operands(_three(layer, x), z, decay, b.sigmoid() * 2.0, None)


def _kimi_linear(layer: Any, x: Tensor, in_place: bool) -> Operands:
    z, gate = layer.g_b_proj(layer.g_a_proj(x)), layer.forget_gate
    decay = gate.f_b_proj(gate.f_a_proj(x)) if getattr(gate, "safe_gate_lower_bound", None) is None else None
    return _kda(layer, x, z, decay)


def _bailing_hybrid(layer: Any, x: Tensor, in_place: bool) -> Operands:
    gate = layer.forget_gate
    return _kda(layer, x, layer.g_proj(x), None if gate.safe_gate else gate.f_proj(x))


def _kda(layer: Any, x: Tensor, z: Tensor, a: Tensor | None) -> Operands:
    """`a`: None if the gate has a form that only the layer computes."""
    gate, b, shape = layer.forget_gate, layer.b_proj(x), (-1, layer.head_dim)
    rows, z = _three(layer, x), z.unflatten(-1, shape)
    if a is None:
        return Operands(rows, z, gate(x), b.sigmoid(), None)
    return Operands(rows, z, a.unflatten(-1, shape), b, (gate.A_log, gate.dt_bias))


def _three(layer: Any, x: Tensor) -> tuple[Tensor, ...]:
    return layer.q_proj(x), layer.k_proj(x), layer.v_proj(x)


_GDN: Callable[[Any], Any] = attrgetter("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim")
_KDA: Callable[[Any], Any] = attrgetter("num_heads", "num_heads", "head_dim", "head_dim")

# By versions of transformers: 5.17 to 5.20, 5.21, 5.23 and 5.24, those that differ.
FAMILIES: dict[str, Family] = {
    source: family
    for sources, family in (
        ("06442ea4 850372b9 91c389dc 19a90aa9", Family(_qwen3_next, _GDN, "norm", "out_proj")),
        # qwen3_5, qwen3_5_moe, qwen4_exp, lara_mini
        ("bd25761e 43718d6c 8f31ae7d 08cf65a6", Family(_qwen3_5, _GDN, "norm", "out_proj")),
        ("2cf524e0 5e351648 167004f1 bc540b7a", Family(_olmo_hybrid, _GDN, "o_norm", "o_proj")),
        ("e5f28cc3 839569f4 20bb94e5", Family(_kimi_linear, _KDA, "o_norm", "o_proj")),
        ("bccfe400 d127300d dc3526db", Family(_kimi_linear, _KDA, "o_norm", "o_proj")),  # glm5_next
        ("45a5d917 e0908796 da6a1d01", Family(_bailing_hybrid, _KDA, "o_norm", "o_proj")),
    )
    for source in sources.split()
}


def source_of(layer: nn.Module) -> str:
    """A digest of what a reader relies on: a layer's methods, and those of modules that it replaces."""
    theirs = [type(layer)]
    theirs += [
        type(child)
        for child in layer.children()
        if type(child).__module__ == type(layer).__module__ and "norm" not in type(child).__name__.lower()
    ]
    text = "".join(
        inspect.getsource(inspect.unwrap(function))
        for kind in theirs
        for name, function in vars(kind).items()
        if inspect.isfunction(function) and name != "__init__"
    )
    return hashlib.sha256(text.encode()).hexdigest()[:8]
