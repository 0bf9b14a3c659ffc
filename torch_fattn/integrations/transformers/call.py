"""The arguments of a layer's call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ...operators.differentiable import MAX_BACKWARD_HEAD_DIM, needs_gradient
from .visibility import LayerMask


@dataclass(frozen=True)
class Call:
    module: nn.Module
    query: Tensor  # [B, Hq, Lq, D]
    key: Tensor  # [B, Hkv, Lk, D]
    value: Tensor
    mask: LayerMask | None
    dropout: float
    scaling: float | None
    sliding_window: int | None  # of the layer
    softcap: float | None
    s_aux: Tensor | None
    is_causal: bool | None
    position_bias: Tensor | None
    keywords: dict[str, Any]  # all others

    @property
    def rows(self) -> int:
        return self.query.shape[2]

    @property
    def keys(self) -> int:
        return self.key.shape[2]

    @property
    def window_left(self) -> int:
        """The operators' window_left: from the mask if it has one, else from the layer."""
        if self.mask is not None and self.mask.window_left is not None:
            return self.mask.window_left
        return -1 if self.sliding_window is None else self.sliding_window - 1

    @property
    def options(self) -> dict[str, Any]:
        """Options that are passed to the operators unchanged."""
        return {"scale": self.scaling, "softcap": self.softcap or 0.0, "sinks": self.s_aux}

    def why_not_trained(self) -> str:
        """Why the kernels cannot train the layer (dropout, gradients of masks and biases, wide heads); empty
        if they can, or if gradients are not needed."""
        if needs_gradient(None if self.mask is None else self.mask.whole, self.position_bias):
            return "a mask or a position bias requires grad, which has no gradient in the kernels"
        widest = max(self.query.shape[-1], self.value.shape[-1])
        if widest > MAX_BACKWARD_HEAD_DIM and needs_gradient(self.query, self.key, self.value):
            return f"gradients of heads of {widest} are not implemented"
        return (
            f"dropout {self.dropout} is not implemented" if self.module.training and self.dropout > 0 else ""
        )
