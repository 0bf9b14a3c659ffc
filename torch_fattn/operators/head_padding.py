"""Heads whose sizes the operators do not take, in sizes that they do."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import pad

HEAD_STEP = 8  # head dims of the operators are multiples of it
MAX_HEAD_DIM = 576  # and at most that


def pad_heads(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None
) -> tuple[Tensor, Tensor, Tensor, float | None]:
    """Operands whose head dims are multiples of HEAD_STEP, and the scale. Zeros behind query and key change
    no score; those behind value are columns of the result that `without_padding` cuts off. Others are copied
    on every call."""
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
