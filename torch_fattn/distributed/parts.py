"""Partial results between ranks. The columns and the sums of a row travel side by side."""

from __future__ import annotations

import torch
from torch import Tensor

from ..operators.parts import merge_parts
from .exchange import Exchange

__all__ = ["SUMS", "Part", "joined", "merge_ranks", "split"]

Part = tuple[Tensor, Tensor]  # out and sums, as `merge_parts` takes them
SUMS = 4  # numbers of a row beside its columns


def joined(part: Part) -> Tensor:
    return torch.cat(part, -1)


def split(part: Tensor) -> Part:
    """Undoes `joined`."""
    return part[..., :-SUMS], part[..., -SUMS:]


def merge_ranks(exchange: Exchange, part: Part, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Out and lse of the parts of all ranks, merged in the order of the ranks: bit-identical on each."""
    if exchange.ranks == 1:
        return merge_parts([part[0]], [part[1]], dtype)
    outs, sums = split(exchange.gather(joined(part)))
    return merge_parts(list(outs), list(sums), dtype)
