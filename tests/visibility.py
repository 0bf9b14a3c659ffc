"""Which keys each query of a problem sees."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tests.problems import Problem


def visibility(problem: Problem, mask: Tensor | None, tree: Tensor | None = None) -> Tensor:
    """bool [B, Hq, Lq, Lk]: key j is visible to row i. A window's right end is behind the causal one."""
    keys = torch.arange(problem.kv_len)
    rows = torch.arange(problem.q_len)
    causal = problem.op != "prefill" or problem.causality != "none"
    visible = torch.empty(problem.batch, problem.q_heads, problem.q_len, problem.kv_len, dtype=torch.bool)
    for b, (length, first) in enumerate(zip(problem.lengths, problem.first_positions, strict=True)):
        seen = (keys < length).expand(problem.q_len, -1)
        if causal:
            seen = seen & (keys <= (first + rows)[:, None])
        if problem.window_left >= 0:
            in_window = keys >= (first + rows)[:, None] - problem.window_left
            seen = seen & (in_window | (keys < problem.sink_tokens))
        if tree is not None:
            bits = tree.expand(problem.batch, -1)[b]
            for draft in range(max(0, -first), problem.q_len):
                seen[:, first + draft] &= (bits >> draft & 1).bool()
        visible[b] = seen
    if mask is not None and mask.dtype == torch.bool:
        visible &= mask
    return visible
