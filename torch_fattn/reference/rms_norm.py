"""`rms_norm` in float64, with the roundings that define it."""

from __future__ import annotations

import torch
from torch import Tensor

from ..runtime.signatures import public

__all__ = ["rms_norm"]


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
    """The normalised rows. The result is not rounded, what it is made of is as `norm` says."""
    out = normed(x, weight, float(eps), norm)
    if gate is None:
        return out
    if norm == "rounded" and weight is not None and weight.dtype == x.dtype:
        out = out.to(x.dtype).double()
    g = gate.detach().cpu().double()
    return out * (g.sigmoid() if activation == "sigmoid" else g * g.sigmoid())


def normed(rows: Tensor, weight: Tensor | None, eps: float, norm: str) -> Tensor:
    """The rows in float64, times the weight if there is one."""
    x = rows.detach().cpu().double()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    if norm == "rounded":
        x = x.to(rows.dtype).double()
    if weight is None:
        return x
    w = weight.detach().cpu().double()
    return x * (w + 1 if norm == "plus_one" else w)
