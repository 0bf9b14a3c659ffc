"""The operators on scores and masks, in float64."""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor

from ..runtime.signatures import public

__all__ = ["mask_map", "softcap", "softmax"]

_INF = float("inf")


@public("torch_fattn.reference.mask_map", refused_by="mask_map")
def mask_map(attn_mask: Tensor) -> Tensor:
    """For each cell of 16 rows and 32 keys: 0 if every entry hides, 2 if every entry is True or 0, else 1,
    plus `4 << f` for each fragment f of 8 keys that hides everything."""
    mask = attn_mask.detach().cpu()[(None,) * (4 - attn_mask.dim())]
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, device="cpu").masked_fill(~mask, -_INF)
    rows, keys = mask.shape[2:]
    cells = torch.empty(*mask.shape[:2], -(-rows // 16), -(-keys // 32), dtype=torch.float64, device="cpu")
    for i, j in product(range(cells.shape[2]), range(cells.shape[3])):
        cell = mask[:, :, 16 * i : 16 * i + 16, 32 * j : 32 * j + 32].flatten(2)
        hidden, whole = (cell == -_INF).all(2), (cell == 0).all(2)
        mixed = torch.ones(hidden.shape, dtype=torch.float64, device="cpu")
        for f, fragment in enumerate(mask[:, :, 16 * i : 16 * i + 16, 32 * j : 32 * j + 32].split(8, 3)):
            if fragment.shape[3] == 8:  # a single key is expanded to all
                mixed += (fragment == -_INF).flatten(2).all(2) * (4 << f)
        cells[:, :, i, j] = mixed.masked_fill(whole, 2.0).masked_fill(hidden, 0.0)
    return cells


@public("torch_fattn.reference.softmax", refused_by="softmax")
def softmax(scores: Tensor, *, softcap: float = 0.0) -> Tensor:
    """Softmax over the last dimension. -inf stays hidden despite a softcap; a row with only -inf is 0."""
    scores = scores.detach().cpu().double()
    hidden = scores == -_INF
    if (softcap := float(softcap)) > 0:
        scores = (softcap * torch.tanh(scores / softcap)).masked_fill(hidden, -_INF)
    return scores.softmax(-1).masked_fill(hidden.all(-1, keepdim=True), 0.0)


@public("torch_fattn.reference.softcap", refused_by="softcap")
def softcap(x: Tensor, cap: float) -> Tensor:
    """`cap * tanh(x / cap)` of each element."""
    cap = float(cap)
    return cap * torch.tanh(x.detach().cpu().double() / cap)
