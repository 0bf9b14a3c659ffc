"""`rms_norm`, `rotary` and `rotary_write` in float64, with the roundings that define them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from ..operators.options import RotaryOptions, RotaryWriteOptions, StorageOptions
from ..operators.parts import token_major
from ..runtime.options import with_defaults
from ..runtime.signatures import check_writable, public
from .attention import cache_write

__all__ = ["rms_norm", "rotary", "rotary_write"]


@public("torch_fattn.reference.rms_norm", refused_by="rms_norm")
def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    gate: Tensor | None = None,
    *,
    eps: float = 1e-6,
    norm: str = "rounded",
    activation: str = "silu",
    float32_out: bool = False,
) -> Tensor:
    """The normalised rows. `norm` defines how intermediate numbers are rounded; the result is not."""
    out = _normed(x, weight, float(eps), norm)
    if gate is None:
        return out
    if norm == "rounded" and weight is not None and weight.dtype == x.dtype:
        out = out.to(x.dtype).double()
    g = gate.detach().cpu().double()
    return out * g.sigmoid() * (g if activation == "silu" else 1)


@public("torch_fattn.reference.rotary", options="rotary", refused_by="rotary")
def rotary(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, **options: Unpack[RotaryOptions]
) -> tuple[Tensor, Tensor]:
    """The rotated query and key, in the layout of the operator's results."""
    every = with_defaults("rotary", options)
    norms = (every["query_norm"], every["key_norm"])
    out, rotated = (
        _rotated(_head(rows, norm, every), rows.dtype, cos, sin, every)
        for rows, norm in zip((query, key), norms, strict=True)
    )
    if every["token_major_out"]:
        return token_major(out), token_major(rotated)
    return out, rotated


@public("torch_fattn.reference.rotary_write", options="rotary_write", refused_by="rotary_write")
def rotary_write(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor | None = None,
    **options: Unpack[RotaryWriteOptions],
) -> Tensor:
    """The rotated query. Writes the rotated key, rounded to its dtype, and the value into the caches."""
    check_writable("torch_fattn.reference.rotary_write", key_cache=key_cache, value_cache=value_cache)
    every: dict[str, Any] = {**with_defaults("rotary_write", options)}
    own = {name: each for name, each in every.items() if name in RotaryOptions.__annotations__}
    stored = {name: each for name, each in every.items() if name in StorageOptions.__annotations__}
    out, rotated = rotary(query, key, cos, sin, **own)
    batch, _, length, _ = query.shape
    if slot_mapping is None:
        capacity = key_cache.shape[1]
        first = torch.zeros(batch, dtype=torch.int64, device="cpu")
        if every["starts"] is not None:
            first += every["starts"].cpu()
        places = every["start"] + first[:, None] + torch.arange(length, device="cpu")
        slots = torch.arange(batch, device="cpu")[:, None] * capacity + places
        slot_mapping = slots.masked_fill((first[:, None] < 0) | (places >= capacity), -1)
    keys, values = (x.transpose(1, 2).flatten(0, 1) for x in (rotated.to(key.dtype), value.detach()))
    cache_write(keys, values, key_cache, value_cache, slot_mapping.flatten(), **stored)
    return out


def _head(rows: Tensor, weight: Tensor | None, options: RotaryOptions) -> Tensor:
    """In float64, rounded to the dtype of rows."""
    if weight is None:
        return rows.detach().cpu().double()
    return _normed(rows, weight, float(options["eps"]), options["norm"]).to(rows.dtype).double()


def _normed(rows: Tensor, weight: Tensor | None, eps: float, norm: str) -> Tensor:
    x = rows.detach().cpu().double()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    if norm == "rounded":
        x = x.to(rows.dtype).double()
    if weight is None:
        return x
    w = weight.detach().cpu().double()
    return x * (w + 1 if norm == "plus_one" else w)


def _rotated(rows: Tensor, dtype: torch.dtype, cos: Tensor, sin: Tensor, options: RotaryOptions) -> Tensor:
    dim, at = options["rotary_dim"] or cos.shape[-1], options["rotary_offset"]
    half, part = dim // 2, rows[..., at : at + dim]
    x, y = part.split(half, -1) if options["style"] == "halves" else (part[..., ::2], part[..., 1::2])
    tables = [table.detach().cpu()[:, None].double() for table in (cos, sin)]

    def turned(x: Tensor, y: Tensor, columns: slice) -> Tensor:
        products = (number * table[..., columns] for number, table in zip((x, y), tables, strict=True))
        if cos.dtype == dtype:
            products = (each.to(dtype).double() for each in products)
        return sum(products, torch.zeros((), device="cpu")).to(dtype).double()

    both = turned(x, -y, slice(half)), turned(y, x, slice(-half, None))
    joined = torch.stack(both, -1).flatten(-2) if options["style"] == "pairs" else torch.cat(both, -1)
    return torch.cat((rows[..., :at], joined, rows[..., at + dim :]), -1)
