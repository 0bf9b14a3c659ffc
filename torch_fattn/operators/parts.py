"""Merges attention over parts of the keys: the results of the operators' overloads `part`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

# The sums of a row: its largest logit in score units and in natural ones, the sum of its weights, and log2 of
# the weight that a score unit makes. The first three of a row that saw no key:
NO_KEYS = (-math.inf, -math.inf, 0.0)


def result_dtype(query: Tensor) -> torch.dtype:
    """The dtype of a result over all keys, which autocast decides."""
    device = query.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else query.dtype


def merge_parts(outs: Sequence[Tensor], sums: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Merges results of the overloads `part`, float32 out `[B, H, L, D]` and sums `[B, H, L, 4]`, into out of
    `dtype` and lse. Weights are right even if logits are so large that an lse would be rounded to the
    logit."""
    out, lse = torch.ops.fattn.merge.parts(torch.stack(list(outs)), torch.stack(list(sums)), dtype)
    return out, lse


def without_keys(sums: Tensor, rows: Tensor) -> Tensor:
    """The sums where `rows`, which can be broadcast to `[.., 1]`, have seen no key after all."""
    return torch.cat((sums[..., :3].where(~rows, sums.new_tensor(NO_KEYS)), sums[..., 3:]), -1)


def shifted(sums: Tensor, distance: Tensor) -> Tensor:
    """The sums of rows after `distance` is subtracted from all their logits."""
    score, logit, total, log2_per_score = sums.unbind(-1)
    scores = distance * (math.log2(math.e) / log2_per_score)
    return torch.stack((score - scores, logit - distance, total, log2_per_score), -1)
