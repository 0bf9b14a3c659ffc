"""Which positions of a sequence each rank holds."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, chain, pairwise
from typing import Any

import torch
from torch import Tensor

from ..runtime.signatures import public, shown

Run = tuple[int, int]  # first position, number of positions


@dataclass(frozen=True)
class Shards:
    """The positions of a sequence that each rank holds, as runs of consecutive positions. Make it with
    `contiguous`, `sizes`, `round_robin` or `zigzag`, or from `runs` that cover every position from 0 on once.

    A rank stores its positions in ascending order: its local index 0 is the first of them.
    """

    runs: tuple[tuple[Run, ...], ...]  # per rank, ascending

    def __post_init__(self) -> None:
        _check_runs(self.runs)

    # Cached: a long sequence has thousands of runs, and every layer hashes the same shards.
    def __hash__(self) -> int:
        return self.checksum

    @cached_property
    def checksum(self) -> int:
        """A hash that is the same in every process."""
        return zlib.crc32(str(self.runs).encode())

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """The number of positions of each rank."""
        return tuple(sum(count for _, count in runs) for runs in self.runs)

    @staticmethod
    @public("Shards.contiguous")
    def contiguous(length: int, ranks: int) -> Shards:
        """One run for each rank, as equal as possible."""
        _check("contiguous", length=(length, 0), ranks=(ranks, 1))
        return Shards.sizes([count for _, count in _chunks(int(length), int(ranks))])

    @staticmethod
    @public("Shards.sizes")
    def sizes(sizes: Sequence[int]) -> Shards:
        """One run for each rank, of these sizes, in the order of the ranks. A size may be 0."""
        _check("sizes", ranks=(len(sizes), 1), **{f"sizes[{n}]": (size, 0) for n, size in enumerate(sizes)})
        counts = [int(size) for size in sizes]
        firsts = accumulate(counts[:-1], initial=0)
        return Shards(tuple(_joined([run]) for run in zip(firsts, counts, strict=True)))

    @staticmethod
    @public("Shards.round_robin")
    def round_robin(length: int, ranks: int, block_size: int) -> Shards:
        """Blocks of `block_size` positions, dealt to the ranks in turn, so that a growing cache fills all
        ranks evenly. The last block may be shorter."""
        _check("round_robin", length=(length, 0), ranks=(ranks, 1), block_size=(block_size, 1))
        return _dealt(int(length), int(ranks), int(block_size))

    @staticmethod
    @public("Shards.zigzag")
    def zigzag(length: int, ranks: int) -> Shards:
        """`2 * ranks` chunks, as equal as possible; rank r has chunk r from the start and chunk r from the
        end. Under a causal mask all ranks then have equal work."""
        _check("zigzag", length=(length, 0), ranks=(ranks, 1))
        chunks = _chunks(int(length), 2 * int(ranks))
        return Shards(tuple(_joined([chunks[r], chunks[-1 - r]]) for r in range(int(ranks))))

    @property
    def ranks(self) -> int:
        return len(self.runs)

    @property
    def length(self) -> int:
        """The number of positions of all ranks."""
        return sum(self.counts)

    @public("Shards.count")
    def count(self, rank: int) -> int:
        """The number of positions of `rank`."""
        self._of("count", rank)
        return self.counts[rank]

    @public("Shards.take")
    def take(self, all_positions: Tensor, dim: int, rank: int) -> Tensor:
        """The positions of `rank` in a tensor of all positions; a view if they are one run."""
        if not -all_positions.dim() <= dim < all_positions.dim() or all_positions.shape[dim] != self.length:
            raise ValueError(
                f"Shards.take: dimension {dim} of shape {list(all_positions.shape)} does not "
                f"have the {self.length} positions of these shards; pass the whole tensor"
            )
        parts = [all_positions.narrow(dim, first, count) for first, count in self._of("take", rank)]
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts, dim) if parts else all_positions.narrow(dim, 0, 0)

    @public("Shards.join")
    def join(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        """The inverse of `take`: joins the parts of all ranks."""
        if len(parts) != self.ranks:
            raise ValueError(
                f"Shards.join: {len(parts)} parts are not one for each of "
                f"{self.ranks} ranks; pass those of all ranks in order"
            )
        for rank, part in enumerate(parts):
            if not -part.dim() <= dim < part.dim() or part.shape[dim] != self.count(rank):
                raise ValueError(
                    f"Shards.join: dimension {dim} of part {rank}, of shape {list(part.shape)}, does not "
                    f"have the {self.count(rank)} positions of that rank"
                )
        if all(len(runs) < 2 for runs in self.runs) and sorted(self.runs) == list(self.runs):
            return torch.cat(list(parts), dim)
        positions = torch.cat([positions_of(self, rank, parts[0].device) for rank in range(self.ranks)])
        return torch.cat(list(parts), dim).index_select(dim, positions.argsort())

    def _of(self, method: str, rank: int) -> tuple[Run, ...]:
        if not 0 <= rank < self.ranks:
            raise ValueError(
                f"Shards.{method}: rank {rank} is not one of {self.ranks} ranks; pass 0 to {self.ranks - 1}"
            )
        return self.runs[rank]


@lru_cache(maxsize=256)
def positions_of(shards: Shards, rank: int, device: torch.device) -> Tensor:
    """The positions that a rank holds, int64, ascending."""
    return positions_in(shards.runs[rank]).to(device)


def positions_in(runs: Sequence[Run]) -> Tensor:
    """The positions of these runs, int64, on the CPU."""
    return torch.cat([torch.arange(first, first + count, device="cpu") for first, count in ((0, 0), *runs)])


@lru_cache(maxsize=256)
def _dealt(length: int, ranks: int, block_size: int) -> Shards:
    runs: list[list[Run]] = [[] for _ in range(ranks)]
    for block, first in enumerate(range(0, length, block_size)):
        runs[block % ranks].append((first, min(block_size, length - first)))
    return Shards(tuple(map(_joined, runs)))


def _joined(runs: Sequence[Run]) -> tuple[Run, ...]:
    """Drops empty runs and joins adjacent ones."""
    joined: list[Run] = []
    for first, count in runs:
        if count and joined and sum(joined[-1]) == first:
            joined[-1] = (joined[-1][0], joined[-1][1] + count)
        elif count:
            joined.append((first, count))
    return tuple(joined)


def _chunks(length: int, number: int) -> list[Run]:
    """Chunks that are as equal as possible."""
    bounds = (length * n // number for n in range(number + 1))
    return [(first, end - first) for first, end in pairwise(bounds)]


def _check_runs(runs: Any) -> None:
    """Refuses runs that miss or repeat a position."""
    is_of_ranks = isinstance(runs, tuple) and all(isinstance(own, tuple) for own in runs)
    if not is_of_ranks or not all(map(_is_pair, chain.from_iterable(runs))):
        raise TypeError(
            f"Shards: runs is {shown(runs)}; pass a tuple for each rank, of pairs (first position, number of "
            "positions)"
        )
    if not runs:
        raise ValueError("Shards: runs is empty; pass a tuple for each rank, () for one without positions")
    end = 0
    for first, count in sorted(chain.from_iterable(runs)):
        if first < 0 or count < 1:
            raise ValueError(
                f"Shards: run {(first, count)} is not of positions from 0 on; pass a first position of at "
                "least 0, and at least 1 position"
            )
        if first != end:
            raise ValueError(
                f"Shards: position {min(first, end)} is in {'two runs' if first < end else 'no run'}; pass "
                "runs that have every position from 0 on once"
            )
        end = first + count
    for rank, own in enumerate(runs):
        if own != tuple(sorted(own)):
            raise ValueError(f"Shards: the runs of rank {rank} are not ascending; sort them")


def _is_pair(run: Any) -> bool:
    is_tuple = isinstance(run, tuple) and len(run) == 2
    return is_tuple and isinstance(run[0], int) and isinstance(run[1], int)


def _check(method: str, **sizes: tuple[int, int]) -> None:
    for what, (size, least) in sizes.items():
        if size < least:
            raise ValueError(f"Shards.{method}: {what} is {size} and must be at least {least}")
