"""Padding of heads to sizes that the operators support."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import pad

HEAD_STEP = 8  # head dims of the operators are multiples of it
MAX_HEAD_DIM = 576  # and at most that


def pad_heads(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None
) -> tuple[Tensor, Tensor, Tensor, float | None]:
    """Pads head dims to multiples of HEAD_STEP, which copies; returns the operands and the scale. Zeros in
    query and key do not change scores; zeros in value become result columns that `without_padding`
    removes."""
    dim = query.shape[-1]
    if dim % HEAD_STEP and dim == key.shape[-1]:
        scale = dim**-0.5 if scale is None else scale
        query, key = _padded(query), _padded(key)
    return query, key, _padded(value), scale


def without_padding(out: Tensor, value_dim: int) -> Tensor:
    return out if out.shape[-1] == value_dim else out[..., :value_dim].contiguous()


def _padded(operand: Tensor) -> Tensor:
    missing = -operand.shape[-1] % HEAD_STEP
    return pad(operand, (0, missing)) if missing else operand
