"""`merge` as a Python function, documented; and the merge of parts whose sums are at hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, overload

import torch
from torch import Tensor

from ._operands import public

__all__ = ["NO_KEYS", "merge", "merge_parts", "shifted"]


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


def merge_parts(outs: Sequence[Tensor], sums: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """out of `dtype` `[B, H, L, D]` and lse of what the operators' overloads `part` returned, float32 out
    `[B, H, L, D]` and sums `[B, H, L, 4]`. Parts count as they should even where logits are so large that an
    lse would be rounded to the logit."""
    out, lse = torch.ops.fattn.merge.parts(torch.stack(list(outs)), torch.stack(list(sums)), dtype)
    return out, lse


# The sums of a row that saw no key: its largest logit in score units and in natural ones, the sum of its
# weights, and log2 of the weight that a score unit makes.
NO_KEYS = (-math.inf, -math.inf, 0.0, 1.0)


def shifted(sums: Tensor, distance: Tensor) -> Tensor:
    """The sums of rows whose logits are all smaller by `distance`."""
    score, logit, total, log2_per_score = sums.unbind(-1)
    scores = distance * (math.log2(math.e) / log2_per_score)
    return torch.stack((score - scores, logit - distance, total, log2_per_score), -1)
