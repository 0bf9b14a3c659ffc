"""Which keys each query of a problem sees."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tests.helpers.problems import Problem


def visibility(
    problem: Problem, mask: Tensor | None, tree: Tensor | None = None, blocks: Tensor | None = None
) -> Tensor:
    """bool [B, Hq, Lq, Lk]: key j is visible to row i."""
    keys = torch.arange(problem.kv_len)
    rows = torch.arange(problem.q_len)
    visible = torch.empty(problem.batch, problem.q_heads, problem.q_len, problem.kv_len, dtype=torch.bool)
    for b, (length, first) in enumerate(zip(problem.lengths, problem.first_positions, strict=True)):
        position = (first + rows)[:, None]
        seen = (keys < length) & (rows < problem.rows[b])[:, None]
        if problem.is_causal:
            seen = seen & (keys <= position)
        in_window = torch.ones_like(seen)
        if problem.window_left >= 0:
            in_window &= keys >= position - problem.window_left
        if problem.window_right >= 0:
            in_window &= keys <= position + problem.window_right
        seen = seen & (in_window | (keys < problem.sink_tokens))
        if tree is not None:
            bits = tree.expand(problem.batch, -1)[b]
            for draft in range(max(0, -first), problem.q_len):
                seen[:, first + draft] &= (bits >> draft & 1).bool()
        visible[b] = seen
    if mask is not None:
        visible &= mask if mask.dtype == torch.bool else mask != -torch.inf
    if blocks is not None and problem.block_mask is not None:
        row, key = (each // size for each, size in zip((rows, keys), problem.block_mask, strict=True))
        visible &= (blocks != 0)[:, :, row][..., key]
    return visible
