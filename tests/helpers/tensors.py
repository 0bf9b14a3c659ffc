"""The tensors in a structure, and whether two have the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def tensors_in(found: Any) -> Iterator[Tensor]:
    if isinstance(found, Tensor):
        yield found
    elif isinstance(found, (tuple, list)):
        for part in found:
            yield from tensors_in(part)
    elif isinstance(found, dict):
        yield from tensors_in(list(found.values()))
    elif hasattr(found, "__dataclass_fields__"):
        yield from tensors_in(list(vars(found).values()))


def same_bits(a: Any, b: Any) -> bool:
    """Whether two tensors, or all tensors in two structures, are equal bit by bit."""
    return all(
        torch.equal(x.cpu().contiguous().view(torch.uint8), y.cpu().contiguous().view(torch.uint8))
        for x, y in zip(tensors_in(a), tensors_in(b), strict=True)
    )
