"""Tensors with given strides, offset and fill value of the storage around them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass
class Operand:
    """One tensor argument: a flat storage on the CPU and the view of it that the op is given."""

    base: Tensor
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, base: Tensor) -> Tensor:
        """The view, of the storage or a copy of it."""
        return base.as_strided(self.size, self.stride, self.offset)

    def on(self, device: str | torch.device) -> tuple[Tensor, Tensor]:
        """The whole storage on that device, and the view."""
        base = self.base.to(device)
        return base, self.of(base)

    def holding(self, values: Tensor) -> Operand:
        """The same with these numbers, which are equal along expanded dimensions."""
        for dim, stride in enumerate(self.stride):
            values = values.narrow(dim, 0, 1) if stride == 0 and values.shape[dim] > 1 else values
        self.base.as_strided(values.shape, self.stride, self.offset).copy_(values)
        return self

    def permuted(self, *order: int) -> Operand:
        size, stride = ([each[dim] for dim in order] for each in (self.size, self.stride))
        return Operand(self.base, tuple(size), tuple(stride), self.offset)

    def first_columns(self, count: int) -> Operand:
        return Operand(self.base, (*self.size[:-1], count), self.stride, self.offset)


def strided(
    size: Sequence[int],
    dtype: torch.dtype,
    fill: Any = torch.nan,
    *,
    order: Sequence[int] | None = None,
    gaps: Mapping[int, int] | None = None,
    step: int = 1,
    offset: int = 0,
    expanded: int | None = None,
) -> Operand:
    """A storage full of `fill`, and a view of it whose dimensions lie in that order, outermost first. `gaps`
    are behind the entries of a dimension, and `step` is from one element to the next."""
    strides, gaps = [0] * len(size), gaps or {}
    for dim in reversed(order or range(len(size))):
        if dim != expanded:
            strides[dim] = step
            step *= max(size[dim], 1) + gaps.get(dim, 0)
    base = torch.full((offset + step + 5,), fill, dtype=dtype)
    return Operand(base, tuple(size), tuple(strides), offset)


def lay_out(values: Tensor, layout: str, fill: Any = float("nan")) -> Operand:
    """Puts `values` [B, H, L, D] into a storage full of `fill` with the strides of that layout."""
    ways: dict[str, dict[str, Any]] = {
        "offset": {"offset": 3},  # off every vector boundary
        "padded_rows": {"offset": 8, "gaps": {3: 4}},
        "every_other": {"offset": 1, "step": 2},
        "token_major": {"order": (0, 2, 1, 3)},
        "expanded_batch": {"expanded": 0},
        "expanded_heads": {"expanded": 1},
    }
    return strided(values.shape, values.dtype, fill, **ways.get(layout, {})).holding(values)


def spread(values: Tensor) -> Operand:
    """Every other element of a storage; NaN, or all bits, between them."""
    fill = torch.nan if values.is_floating_point() else -1
    base = torch.full((2 * values.numel() + 1,), fill, dtype=values.dtype)
    base[1::2] = values.flatten()
    return Operand(base, tuple(values.shape), tuple(2 * step for step in values.stride()), 1)


def flat(values: Tensor) -> Operand:
    return Operand(values.reshape(-1), tuple(values.shape), values.stride(), 0)


def packed(values: Tensor, lengths: tuple[int, ...], spare: int, layout: str) -> Operand:
    """The first rows of each sequence of `values` [B, H, L, D] in one tensor [T, H, D]. The last `spare` rows
    belong to no sequence and are NaN."""
    _, heads, _, dim = values.shape
    parts = [values[b, :, :rows] for b, rows in enumerate(lengths)]
    parts.append(torch.full((heads, spare, dim), torch.nan, dtype=values.dtype))
    return lay_out(torch.cat(parts, dim=1)[None], layout).permuted(2, 1, 3)


def starts(lengths: tuple[int, ...]) -> Operand:
    """cu_seqlens: where each sequence begins among the packed rows, and where the last one ends."""
    return spread(torch.tensor([0, *lengths]).cumsum(0).to(torch.int32))
