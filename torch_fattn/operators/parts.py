"""Merges attention over parts of the keys: the results of the overloads `part`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

# The sums of a row: its maximum logit in score units and in natural units, the sum of its weights, and log2
# of the weight per score unit. The first three for a row that saw no key:
NO_KEYS = (-math.inf, -math.inf, 0.0)


def result_dtype(query: Tensor) -> torch.dtype:
    """The dtype of a result over all keys, which autocast decides."""
    device = query.device.type
    is_cast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if is_cast else query.dtype


def merge_parts(outs: Sequence[Tensor], sums: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Merges results of the overloads `part`, float32 out `[B, H, L, D]` and sums `[B, H, L, 4]`, into out of
    `dtype` and lse. Weights are correct even if logits are so large that an lse would round to the logit."""
    out, lse = torch.ops.fattn.merge.parts(torch.stack(list(outs)), torch.stack(list(sums)), dtype)
    return out, lse


def token_major(out: Tensor) -> Tensor:
    """Copies `[B, Hq, Lq, Dv]` to a view of a tensor `[B, Lq, Hq, Dv]`."""
    return out.transpose(1, 2).contiguous().transpose(1, 2)


def without_keys(sums: Tensor, rows: Tensor) -> Tensor:
    """Resets the sums of `rows`, broadcastable to `[.., 1]`, to those of rows that saw no key."""
    return torch.cat((sums[..., :3].where(~rows, sums.new_tensor(NO_KEYS)), sums[..., 3:]), -1)


def shifted(sums: Tensor, distance: Tensor) -> Tensor:
    """The sums of rows after subtracting `distance` from their logits."""
    score, logit, total, log2_per_score = sums.unbind(-1)
    scores = distance * (math.log2(math.e) / log2_per_score)
    return torch.stack((score - scores, logit - distance, total, log2_per_score), -1)


def added_parts(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Merges results of the overloads `part` over disjoint keys into a part. The sums are in the units of the
    first."""
    if len(parts) == 1:
        return parts[0]
    units = parts[0][1][..., 3]
    scores = torch.stack([sums[..., 0] * (sums[..., 3] / units) for _, sums in parts])
    score = scores.amax(0)
    weights = torch.exp2((scores - score.masked_fill(score == -math.inf, 0.0)) * units)
    totals = torch.stack([sums[..., 2] for _, sums in parts])
    logit = torch.stack([sums[..., 1] for _, sums in parts]).amax(0)
    out = torch.zeros_like(parts[0][0])
    for (own, _), weight, total in zip(parts, weights, totals, strict=True):
        # The out of a part without keys is arbitrary.
        out += (own * weight[..., None]).where(total[..., None] != 0, 0.0)
    return out, torch.stack((score, logit, (totals * weights).sum(0), units), -1)


def with_sinks(out: Tensor, sums: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Adds the logits of sinks `[H]`, which have no value, to a part."""
    logit = sinks.float()[:, None].expand(sums.shape[:-1])
    units = sums[..., 3]
    total = (logit != -math.inf).float()
    sink_sums = torch.stack((logit * (math.log2(math.e) / units), logit, total, units), -1)
    return added_parts(((out, sums), (torch.zeros_like(out), sink_sums)))
