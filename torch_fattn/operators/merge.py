"""`merge` as a Python function, documented."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from ..runtime.signatures import public

__all__ = ["merge"]


@overload
def merge(outs: Tensor, lses: Tensor, *, return_lse: Literal[False] = ...) -> Tensor: ...
@overload
def merge(outs: Tensor, lses: Tensor, *, return_lse: Literal[True]) -> tuple[Tensor, Tensor]: ...
@overload
def merge(outs: Tensor, lses: Tensor, *, return_lse: bool) -> Tensor | tuple[Tensor, Tensor]: ...
@public("fattn.merge")
def merge(outs: Tensor, lses: Tensor, *, return_lse: bool = False) -> Tensor | tuple[Tensor, Tensor]:
    """Combine attention over disjoint sets of keys into attention over their union.

    Args:
        outs: `[N, B, H, L, D]`, the `out` of N calls, float32, float16 or bfloat16.
        lses: float32 `[N, B, H, L]`, their `lse`. A part whose lse is -inf saw no key and counts for nothing.

    Returns:
        out `[B, H, L, D]` of the dtype of outs; with `return_lse` also lse `[B, H, L]`, float32.
    """
    out, lse = torch.ops.fattn.merge(outs, lses)
    return (out, lse) if return_lse else out
