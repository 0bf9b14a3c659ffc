"""Markers for torch.compile that do not import torch._dynamo, which takes as long as importing torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])


def constant_in_graphs(function: _Function) -> _Function:
    """The marker of `torch._dynamo.assume_constant_result`: the result becomes a graph constant."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def untraced(reason: str) -> Callable[[_Function], _Function]:
    """`torch.compiler.disable`, with types. It imports torch._dynamo."""
    disable: Callable[[_Function], _Function] = torch.compiler.disable(reason=reason)
    return disable
