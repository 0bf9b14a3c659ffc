"""What all ranks of a call must pass alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .dtensor import is_dtensor
from .exchange import Facts
from .shards import Shards

__all__ = ["facts_of", "refuse_dtensors", "refuse_gradients"]


def facts_of(
    name: str, query: Tensor, rows: int, kv_heads: int, value_dim: int, options: Any, *shards: Any
) -> Facts:
    """`rows`: of all ranks."""
    batch, heads, _, head_dim = query.shape
    return {
        "call": name,
        "dtype": query.dtype,
        "batch size": batch,
        "query heads": heads,
        "key-value heads": kv_heads,
        "query rows": rows,
        "head_dim": head_dim,
        "value head_dim": value_dim,
        "options": sorted((key, _compared(value)) for key, value in options.items() if value is not None),
        "shards": [_compared(each) for each in shards],
    }


def _compared(value: Any) -> str:
    if isinstance(value, Shards):
        return str(value.checksum)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return str([_compared(each) for each in value])
    # A mask has other columns on every rank, and to compare contents would wait for the device.
    return f"{value.dtype}, {value.dim()} dimensions" if isinstance(value, Tensor) else repr(value)


def refuse_dtensors(name: str, operands: Mapping[str, Tensor]) -> None:
    for what, operand in operands.items():
        if is_dtensor(operand):
            raise TypeError(f"{name}: {what} is a DTensor; pass this rank's part of it, {what}.to_local()")


def refuse_gradients(name: str, operands: Mapping[str, Tensor]) -> None:
    for what, operand in operands.items():
        if operand.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError(
                f"{name}: {what} requires grad, and there are no gradients across ranks; call it under "
                "torch.no_grad()"
            )
