"""Marks that torch.compile reads. Importing torch._dynamo for them takes as long as importing torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])


def constant_in_graphs(function: _Function) -> _Function:
    """The mark of `torch._dynamo.assume_constant_result`: a graph keeps the function's result."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def untraced(reason: str) -> Callable[[_Function], _Function]:
    """`torch.compiler.disable`, with types: a graph breaks at the function. It imports torch._dynamo."""
    disable: Callable[[_Function], _Function] = torch.compiler.disable(reason=reason)
    return disable
