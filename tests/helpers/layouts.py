"""Tensors with given strides, offset and fill value of the storage around them."""

from __future__ import annotations

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

    def first_columns(self, count: int) -> Operand:
        return Operand(self.base, (*self.size[:-1], count), self.stride, self.offset)


def lay_out(values: Tensor, layout: str, fill: Any = float("nan")) -> Operand:
    """Puts `values` [B, H, L, D] into a storage full of `fill` with the strides of that layout."""
    stored = values
    if layout == "expanded_batch":
        stored = values[:1]
    elif layout == "expanded_heads":
        stored = values[:, :1]
    batch, heads, length, dim = stored.shape
    offset, step, row = 0, 1, dim
    if layout == "offset":
        offset = 3  # off every vector boundary
    elif layout == "padded_rows":
        offset, row = 8, dim + 4
    elif layout == "every_other":
        offset, step, row = 1, 2, 2 * dim
    if layout == "token_major":
        stride = (length * heads * row, row, heads * row, step)
    else:
        stride = (heads * length * row, length * row, row, step)
    base = torch.full((offset + batch * heads * length * row + 5,), fill, dtype=values.dtype)
    base.as_strided(stored.shape, stride, offset).copy_(stored)
    if layout == "expanded_batch":
        stride = (0, *stride[1:])
    elif layout == "expanded_heads":
        stride = (stride[0], 0, *stride[2:])
    return Operand(base, tuple(values.shape), stride, offset)


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
    rows = lay_out(torch.cat(parts, dim=1)[None], layout)
    strides = tuple(rows.stride[d] for d in (2, 1, 3))
    return Operand(rows.base, (rows.size[2], heads, dim), strides, rows.offset)


def starts(lengths: tuple[int, ...]) -> Operand:
    """cu_seqlens: where each sequence begins among the packed rows, and where the last one ends."""
    return spread(torch.tensor([0, *lengths]).cumsum(0).to(torch.int32))
