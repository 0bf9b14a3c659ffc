"""Index tensors, built on the device from runs of consecutive numbers: copying them from the host would wait
for the GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral

import torch
from torch import Tensor
from torch.nn.functional import pad


def fill(out: Tensor, numbers: Sequence[int]) -> None:
    """Writes the numbers into a tensor on the device."""
    start = 0
    for end in range(1, len(numbers) + 1):
        if end == len(numbers) or numbers[end] != numbers[end - 1] + 1:
            run = out[start:end]
            torch.arange(numbers[start], numbers[end - 1] + 1, out=run, device=run.device)
            start = end


def on_device(numbers: Sequence[int], device: torch.device) -> Tensor:
    """The numbers as int64 on the device."""
    out = torch.empty(len(numbers), dtype=torch.int64, device=device)
    fill(out, numbers)
    return out


@dataclass(frozen=True)
class NewTokens:
    """Packed tokens of several sequences. All fields but the counts are on the device."""

    counts: Tensor | int  # int64 [batch]; an int applies to every sequence
    sequence: Tensor  # the index of each token's sequence in the batch
    offset: Tensor  # its index among the new tokens of its sequence
    starts: Tensor  # first token of each sequence, and the end: int32 [batch + 1]


def new_tokens(counts: Sequence[int], device: torch.device) -> NewTokens:
    token = torch.arange(sum(counts), device=device)
    if len(set(counts)) <= 1:
        each = counts[0] if counts else 0
        starts = torch.arange(len(counts) + 1, dtype=torch.int32, device=device) * each
        return NewTokens(each, token // max(each, 1), token % max(each, 1), starts)
    numbers = on_device(counts, device)
    batch = torch.arange(len(counts), device=device)
    sequence = torch.repeat_interleave(batch, numbers, output_size=len(token))
    starts = pad(numbers.cumsum(0), (1, 0))
    return NewTokens(numbers, sequence, token - starts[sequence], starts.int())


def counts_of(name: str, tokens: int | Sequence[int], batch: int) -> list[int]:
    """A number of new tokens for each sequence."""
    counts = [int(tokens)] * batch if isinstance(tokens, (int, Integral)) else [int(n) for n in tokens]
    if len(counts) != batch:
        raise ValueError(
            f"{name}: {len(counts)} numbers of new tokens were given for {batch} sequences; give one for each"
        )
    if any(count < 0 for count in counts):
        raise ValueError(f"{name}: {min(counts)} is not a number of new tokens; give 0 or more")
    return counts
