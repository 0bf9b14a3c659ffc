"""Sequences of a paged cache, and the blocks that new tokens of them need. Host numbers only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from .blocks import BlockPool


@dataclass
class PagedSequence:
    row: int  # row in the device's tables
    length: int = 0
    blocks: list[int] = field(default_factory=list)
    changed: int = 0  # the count of changes to the cache when its tokens changed last


@dataclass(frozen=True)
class Growth:
    """What a sequence needs for its new tokens."""

    sequence: PagedSequence
    tokens: int
    copies_end: bool  # the last block is partly filled and shared
    new: int  # blocks after it

    @property
    def blocks(self) -> int:
        return self.new + self.copies_end

    @property
    def length(self) -> int:
        return self.sequence.length + self.tokens


def plan_growth(
    pool: BlockPool, block_size: int, sequences: Sequence[PagedSequence], counts: Sequence[int]
) -> list[Growth]:
    """A shared, partly filled block is copied for all its sequences but the last, which keeps it."""
    plan, copied = [], Counter[int]()
    for sequence, count in zip(sequences, counts, strict=True):
        new, copies_end = 0, False
        if count > 0:
            new = -(-(sequence.length + count) // block_size) - len(sequence.blocks)
            if sequence.length % block_size != 0:
                end = sequence.blocks[-1]
                copies_end = pool.users(end) - copied[end] > 1
                copied[end] += copies_end
        plan.append(Growth(sequence, count, copies_end, new))
    return plan
