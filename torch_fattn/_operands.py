"""What must be a tensor before `torch.ops.fattn` sees it: torch finds no operator for a call without one."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.overrides import is_tensor_like


def check_tensor(name: str, what: str, operand: Any, shape: str = "") -> None:
    if isinstance(operand, Tensor) or is_tensor_like(operand):  # the latter: what stands for one in torch.fx
        return
    found = "None" if operand is None else f"of type {type(operand).__name__}"
    raise TypeError(f"{name}: {what} is {found}; pass a tensor" + (f" of shape {shape}" if shape else ""))
