"""The sequences of a cache: their blocks, the layers that have their tokens, and what new or accepted tokens
change. Host numbers only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from itertools import islice

from torch import Tensor

from .blocks import GONE, BlockPool


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


class Filled:
    """Runs of tokens that some layers lack: the first position of each, and the layers that have it. The set
    of the newest step grows as layers append. A layer that lacks a run lacks all later ones.
    """

    def __init__(self, runs: Sequence[tuple[int, AbstractSet[int]]] = ()) -> None:
        self._runs = [*runs]

    def copy(self) -> Filled:
        return Filled(self._runs)

    def freeze(self, every: AbstractSet[int]) -> None:
        """Ignores, for this sequence, layers that append the newest step later."""
        if not self._runs:
            return
        first, layers = self._runs.pop()
        is_continued = bool(self._runs) and self._runs[-1][1] == layers
        if layers != every and not is_continued:
            self._runs.append((first, frozenset(layers)))

    def add(self, first: int, layers: AbstractSet[int], every: AbstractSet[int]) -> None:
        """Adds new tokens from this position on."""
        self.freeze(every)
        self._runs.append((first, layers))

    def cut(self, length: int) -> None:
        """Drops the tokens from this position on."""
        while self._runs and self._runs[-1][0] >= length:
            self._runs.pop()

    def lacking(self, layers: AbstractSet[int]) -> AbstractSet[int]:
        """The layers that lack a token."""
        return layers - self._runs[-1][1] if self._runs else frozenset()

    def gap(self, layers: AbstractSet[int], length: int) -> tuple[int, int] | None:
        """The first layer that lacks one of the first `length` tokens, and that token's position."""
        gaps = ((first, min(layers - found)) for first, found in self._runs if layers - found)
        position, layer = next(gaps, (length, -1))
        return (layer, position) if position < length else None


@dataclass(frozen=True)
class Swapped:
    """Blocks of a sequence in host memory."""

    places: list[int]  # in the sequence
    rows: list[Tensor]


@dataclass
class CachedSequence:
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

    def fork(self, row: int) -> CachedSequence:
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


@dataclass
class Tail:
    """A change of a sequence's tokens from position `begin` on: it keeps some of them, which move together,
    and gets room for new ones, up to `length`."""

    sequence: CachedSequence
    begin: int
    kept: Sequence[int]  # counted from `begin`
    length: int
    copied: list[int] = field(default_factory=list)  # shared blocks to write, as indices in the table

    @property
    def first(self) -> int:
        """The first position whose token changes, or the end."""
        moved = (self.begin + i for i, j in enumerate(self.kept) if i != j)
        return next(moved, self.begin + len(self.kept))

    def written(self, block_size: int) -> range:
        """The blocks of the sequence to which tokens are written, as indices in the table."""
        end = -(-self.length // block_size) if self.first < self.length else 0
        return range(self.first // block_size, min(end, len(self.sequence.blocks)))

    def new_blocks(self, block_size: int) -> int:
        """How many blocks it needs, copies included."""
        return max(-(-self.length // block_size) - len(self.sequence.blocks), 0) + len(self.copied)

    def blocks(self, fresh: Iterator[int], block_size: int) -> list[int]:
        """The blocks of the sequence then."""
        blocks = [*self.sequence.blocks]
        for n in self.copied:
            blocks[n] = next(fresh)
        return blocks + list(islice(fresh, self.new_blocks(block_size) - len(self.copied)))

    def moves(self, blocks: Sequence[int], block_size: int) -> Iterator[tuple[int, int]]:
        """Old and new slot of each token that moves or precedes one in a copied block."""
        for to in range(self.first // block_size * block_size, self.begin + len(self.kept)):
            if to >= self.first or to // block_size in self.copied:
                source = to if to < self.begin else self.begin + self.kept[to - self.begin]
                old, new = self.sequence.blocks[source // block_size], blocks[to // block_size]
                yield old * block_size + source % block_size, new * block_size + to % block_size


def plan_copies(pool: BlockPool, block_size: int, tails: Sequence[Tail]) -> None:
    """A shared block to write is copied for every sequence but the last, which keeps it."""
    copies = Counter[int]()
    for tail in tails:
        for n in tail.written(block_size):
            block = tail.sequence.blocks[n]
            if pool.users(block) - copies[block] > 1:
                copies[block] += 1
                tail.copied.append(n)


def longest_prefix(blocks: Sequence[int | None], window: Window, block_size: int) -> list[int]:
    """The longest prefix whose visible blocks were all found (None: not found). Blocks that later rows do not
    see are `GONE`."""
    first_missing = next((n for n, block in enumerate(blocks) if block is None), len(blocks))
    longest, run = 0, 0  # run: consecutive blocks found, ending here
    for end, block in enumerate(blocks, 1):
        run = 0 if block is None else run + 1
        begin_hidden, end_hidden = window.hidden(end * block_size, block_size)
        if run >= end - end_hidden and first_missing >= begin_hidden:
            longest = end
    begin_hidden, end_hidden = window.hidden(longest * block_size, block_size)
    seen = [None if begin_hidden <= n < end_hidden else block for n, block in enumerate(blocks[:longest])]
    return [GONE if block is None else block for block in seen]


def counts_of(name: str, sequences: Sequence[int], tokens: int | Sequence[int]) -> list[int]:
    """A number of new tokens for each sequence. Errors begin with `name`."""
    if len(set(sequences)) != len(sequences):
        raise ValueError(f"{name}: sequences {list(sequences)} are not distinct; give each once")
    counts = [int(n) for n in (tokens if isinstance(tokens, Sequence) else [tokens] * len(sequences))]
    if len(counts) != len(sequences):
        raise ValueError(
            f"{name}: {len(counts)} numbers of new tokens were given for {len(sequences)} sequences; "
            "give one for each"
        )
    if any(count < 0 for count in counts):
        raise ValueError(f"{name}: {min(counts)} is not a number of new tokens; give 0 or more")
    return counts
