"""Checks of tensors, for functions whose operators would name other arguments or shapes. Each error begins
with the `name` of the function; `query` is the tensor that decides the device, named `first` in errors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .signatures import check_tensor

Shape = tuple[str | int, ...]  # the name of each dimension, or its size


def check_shape(name: str, what: str, tensor: Any, shape: Shape) -> None:
    if not isinstance(tensor, Tensor):
        check_tensor(name, what, tensor, _text(shape))
    # Formatting symbolic sizes specialises the graph to them, so only errors do it.
    fits = tensor.dim() == len(shape) and all(
        isinstance(wanted, str) or wanted == size for wanted, size in zip(shape, tensor.shape, strict=True)
    )
    if not fits:
        raise ValueError(f"{name}: {what} has shape {list(tensor.shape)}; pass {_text(shape)}")


def check_device(name: str, what: str, tensor: Tensor, query: Tensor, first: str = "query") -> None:
    if tensor.device != query.device:
        # Advise to move tensors from the CPU to the GPU.
        is_far = query.device.type == "cpu" and tensor.device.type != "meta"
        moved, other = (first, what) if is_far else (what, first)
        raise ValueError(
            f"{name}: {what} is on {tensor.device} and {first} on {query.device}; move {moved} with "
            f".to({other}.device)"
        )


def check_integers(
    name: str,
    what: str,
    numbers: Any,
    shape: Shape,
    query: Tensor,
    first: str = "query",
    *,
    or_int64: bool = False,
) -> None:
    check_shape(name, what, numbers, shape)
    if numbers.dtype != torch.int32 and not (or_int64 and numbers.dtype == torch.int64):
        raise TypeError(f"{name}: {what} is {numbers.dtype}; convert it with .to(torch.int32)")
    check_device(name, what, numbers, query, first)


def _text(shape: Shape) -> str:
    return f"[{', '.join(map(str, shape))}]"


def check_available(name: str, device: torch.device | str) -> None:
    try:
        torch.empty(1, dtype=torch.uint8, device=device)
    except (AssertionError, NotImplementedError, RuntimeError, ValueError):
        raise ValueError(
            f'{name}: device {str(device)!r} is not available here; use "mps" or "cpu"'
        ) from None
