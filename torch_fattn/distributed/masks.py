"""The caller's mask, if there is one, with what positions add to it."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["biased", "limited"]


def biased(mask: Tensor | None, bias: Tensor) -> Tensor:
    """An additive mask."""
    if mask is None:
        return bias
    return bias.where(mask, -torch.inf) if mask.dtype == torch.bool else mask.float() + bias


def limited(mask: Tensor | None, visible: Tensor) -> Tensor:
    """The mask, which also hides what is not `visible`."""
    if mask is None:
        return visible
    return mask & visible if mask.dtype == torch.bool else mask.where(visible, -torch.inf)
