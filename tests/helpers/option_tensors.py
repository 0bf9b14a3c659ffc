"""The tensors of the options of random problems, and what options make of a score."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tests.helpers.problems import Problem, Score


def _parameter_dtype(problem: Problem) -> torch.dtype:
    """A layer's parameters have the dtype of its operands, or are kept in float32."""
    return problem.dtype if problem.index % 3 else torch.float32


def sinks(problem: Problem, generator: torch.Generator) -> Tensor:
    return (torch.randn(problem.q_heads, generator=generator) * 2).to(_parameter_dtype(problem))


def slopes(problem: Problem, generator: torch.Generator) -> Tensor:
    by_sequence = (problem.batch,) if problem.index % 2 else ()
    slopes = torch.rand(*by_sequence, problem.q_heads, generator=generator) * 0.2
    return slopes.to(_parameter_dtype(problem))


def limited(score: float, cap: float, _: Score) -> float:
    return cap * math.tanh(score / cap)


def sloped(score: float, slopes: Tensor, of: Score) -> float:
    return score + float((slopes[of.sequence] if slopes.dim() == 2 else slopes)[of.head]) * of.distance


def tree(problem: Problem, generator: torch.Generator) -> Tensor:
    rows, size = problem.q_len, (problem.batch, problem.q_len)[problem.tree == "shared" :]
    return torch.randint(-(2**63) * (rows > 62), 2 ** min(rows, 62), size, generator=generator)


def blocks(problem: Problem, generator: torch.Generator) -> Tensor:
    """The density is any, and some rows are all hidden. For each sequence and head, or for all."""
    assert problem.block_mask is not None
    whole = (problem.batch, problem.q_heads, problem.q_len, problem.kv_len)
    size = [-(-n // block) for n, block in zip(whole, (1, 1, *problem.block_mask), strict=True)]
    size[:2] = [n if problem.index >> bit & 1 else 1 for bit, n in enumerate(size[:2])]
    density = torch.rand((*size[:3], 1), generator=generator) * 1.5 - 0.25
    visible = torch.rand(size, generator=generator) < density
    if problem.index % 3:
        return visible
    return visible * torch.randint(1, 256, size, generator=generator, dtype=torch.uint8)
