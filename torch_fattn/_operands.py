"""What is said of arguments of the wrong type. Some must be looked at before `torch.ops.fattn` sees them:
torch finds no operator for a call without a tensor."""

from __future__ import annotations

import os
import re
from typing import Any

import torch
from torch import Tensor
from torch.overrides import is_tensor_like


def check_tensor(name: str, what: str, operand: Any, shape: str = "") -> None:
    if isinstance(operand, Tensor) or is_tensor_like(operand):  # the latter: what stands for one in torch.fx
        return
    found = "None" if operand is None else f"of type {type(operand).__name__}"
    raise TypeError(f"{name}: {what} is {found}; pass a tensor" + (f" of shape {shape}" if shape else ""))


def is_checked() -> bool:
    """Whether numbers on the device are to be looked at, as in the operators."""
    return not torch.compiler.is_compiling() and os.environ.get("FATTN_CHECK", "") not in ("", "0")


_WRONG_TYPE = re.compile(r"Expected a value of type '(.*?)' for argument '(\w+)' .* found type '(.*?)'")
_IN_WORDS = {"Tensor": "a tensor", "float": "a number", "int": "a whole number", "bool": "True or False"}


def in_a_sentence(name: str, error: RuntimeError) -> Exception:
    """Of an argument of another type torch prints the whole value and the schema. Other errors stay."""
    if (found := _WRONG_TYPE.search(str(error))) is None:
        return error
    wanted, what, given = found.groups()
    inner = wanted.removeprefix("Optional[").removesuffix("]")
    words = _IN_WORDS.get(inner, inner) + (" or None" if inner != wanted else "")
    return TypeError(f"{name}: {what} is of type {given}; pass {words}")
