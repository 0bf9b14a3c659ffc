"""Attention over a part of the keys, and parts put together: what the operators' overloads `part` return."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

# The sums of a row: its largest logit in score units and in natural ones, the sum of its weights, and log2 of
# the weight that a score unit makes. The first three of a row that saw no key:
NO_KEYS = (-math.inf, -math.inf, 0.0)


def merge_parts(outs: Sequence[Tensor], sums: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """out of `dtype` `[B, H, L, D]` and lse of what the operators' overloads `part` returned, float32 out
    `[B, H, L, D]` and sums `[B, H, L, 4]`. Parts count as they should even where logits are so large that an
    lse would be rounded to the logit."""
    out, lse = torch.ops.fattn.merge.parts(torch.stack(list(outs)), torch.stack(list(sums)), dtype)
    return out, lse


def without_keys(sums: Tensor, rows: Tensor) -> Tensor:
    """The sums where `rows`, which can be broadcast to `[.., 1]`, have seen no key after all."""
    return torch.cat((sums[..., :3].where(~rows, sums.new_tensor(NO_KEYS)), sums[..., 3:]), -1)


def shifted(sums: Tensor, distance: Tensor) -> Tensor:
    """The sums of rows whose logits are all smaller by `distance`."""
    score, logit, total, log2_per_score = sums.unbind(-1)
    scores = distance * (math.log2(math.e) / log2_per_score)
    return torch.stack((score - scores, logit - distance, total, log2_per_score), -1)
