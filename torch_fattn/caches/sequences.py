"""Sequences of a paged cache, and the blocks that their new tokens need. Host numbers only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from .blocks import GONE, BlockPool
from .filled import Filled


@dataclass(frozen=True)
class Window:
    """The keys that a row sees: `left` before its own, and the first `sink_tokens`."""

    left: int = -1  # all
    sink_tokens: int = 0

    def hidden(self, position: int, block_size: int) -> tuple[int, int]:
        """Begin and end of the blocks that are hidden from rows at this position and later, and from the row
        before, which a step without new tokens may repeat."""
        end = max(position - 1 - self.left, 0) // block_size if self.left >= 0 else 0
        return min(self.sink_blocks(block_size), end), end

    def sink_blocks(self, block_size: int) -> int:
        return -(-self.sink_tokens // block_size)


@dataclass(frozen=True)
class Swapped:
    """Blocks of a sequence in host memory."""

    places: list[int]  # in the sequence
    rows: list[Tensor]


@dataclass
class PagedSequence:
    row: int  # row in the device's tables
    salt: str = ""
    epoch: int = 0  # of its blocks' prefix keys
    length: int = 0
    filled: Filled = field(default_factory=Filled)
    blocks: list[int] = field(default_factory=list)
    hidden: int = 0  # blocks before this one are `GONE` if they hold no sink token
    missing: range = range(0)  # positions before the window that the file of load() lacked
    token_ids: list[int] = field(default_factory=list)  # of the blocks with keys
    keys: list[bytes] = field(default_factory=list)
    swapped: Swapped | None = None  # its blocks then are `GONE`
    changed: int = 0  # the cache's count of changes at this sequence's last change

    def fork(self, row: int) -> PagedSequence:
        own = replace(self, row=row, blocks=[*self.blocks], token_ids=[*self.token_ids], keys=[*self.keys])
        own.filled = self.filled.copy()
        return own

    def cut(self, length: int, block_size: int) -> list[int]:
        """Drops the newest tokens. Returns the blocks that are now empty."""
        self.length = length
        self.filled.cut(length)
        self.drop_keys(length, block_size)
        used = -(-length // block_size)
        self.hidden = min(self.hidden, used)
        self.missing = self.missing[: max(length - self.missing.start, 0)] or range(0)
        dropped = self.blocks[used:]
        del self.blocks[used:]
        return dropped

    def drop_keys(self, position: int, block_size: int) -> None:
        """Drops the keys of blocks with tokens from this position on, which change."""
        del self.keys[position // block_size :]
        del self.token_ids[len(self.keys) * block_size :]

    def places(self, block_size: int) -> Iterator[tuple[int, int]]:
        """Positions and slots of the tokens that are present."""
        for n, block in enumerate(self.blocks):
            first = n * block_size
            for position in range(first, min(first + block_size, self.length) if block != GONE else first):
                if position not in self.missing:
                    yield position, block * block_size + position - first

    def slots(self, block_size: int) -> list[int]:
        return [slot for _, slot in self.places(block_size)]

    def is_whole(self, index: int, block_size: int) -> bool:
        """Whether this block is present with all its tokens."""
        first = index * block_size
        is_missing = first < self.missing.stop and self.missing.start < first + block_size
        return self.blocks[index] != GONE and not is_missing

    def hide(self, begin: int, end: int) -> list[int]:
        """Releases these blocks, which are no longer visible."""
        begin = max(begin, self.hidden)
        released = self.blocks[begin:end]
        self.blocks[begin:end] = [GONE] * len(released)
        self.hidden = max(end, self.hidden)
        return released


@dataclass(frozen=True)
class Growth:
    """The blocks that a sequence needs for its new tokens."""

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
    """A shared, partly filled block is copied for every sequence but the last, which keeps it."""
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
