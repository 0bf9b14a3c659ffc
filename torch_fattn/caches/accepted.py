"""Computes the slots that a sequence's accepted tokens move to. Host numbers only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from .blocks import BlockPool
from .sequences import PagedSequence


@dataclass
class Acceptance:
    """Which of the newest `tokens` tokens of a sequence are accepted. They move next to the tokens before."""

    sequence: PagedSequence
    tokens: int
    accepted: Sequence[int]
    copied: list[int] = field(default_factory=list)  # shared blocks to write, as indices in the table

    @property
    def length(self) -> int:
        return self.sequence.length - self.tokens + len(self.accepted)

    @property
    def first(self) -> int:
        """The first position whose token changes, or the end."""
        return next((to for _, to in self._moves()), self.length)

    @property
    def is_all(self) -> bool:
        return len(self.accepted) == self.tokens

    def _moves(self) -> Iterator[tuple[int, int]]:
        """Old and new position of each token that moves."""
        first = self.sequence.length - self.tokens
        return ((first + j, first + i) for i, j in enumerate(self.accepted) if i != j)

    def plan(self, pool: BlockPool, block_size: int) -> None:
        written = self._written(block_size)
        self.copied = [index for index in written if pool.users(self.sequence.blocks[index]) > 1]

    def _written(self, block_size: int) -> list[int]:
        """The blocks that tokens move to, as indices in the table."""
        return [*dict.fromkeys(to // block_size for _, to in self._moves())]

    def blocks(self, copies: Sequence[int]) -> list[int]:
        """The blocks with these copies."""
        blocks = [*self.sequence.blocks]
        for index, copy in zip(self.copied, copies, strict=True):
            blocks[index] = copy
        return blocks

    def slots(self, blocks: Sequence[int], block_size: int) -> Iterator[tuple[int, int]]:
        """Old and new slot of each token that moves or precedes one in a copied block."""
        moves = list(self._moves())
        if not moves:
            return
        start = moves[0][1]  # only the first moved token's block holds earlier tokens
        if start // block_size in self.copied:
            moves[:0] = ((position, position) for position in range(start - start % block_size, start))
        for source, target in moves:
            old, new = self.sequence.blocks[source // block_size], blocks[target // block_size]
            yield old * block_size + source % block_size, new * block_size + target % block_size

    def written(self, block_size: int) -> list[int]:
        """The unshared blocks that tokens move to."""
        indices = [index for index in self._written(block_size) if index not in self.copied]
        return [self.sequence.blocks[index] for index in indices]
