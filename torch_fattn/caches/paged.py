"""`PagedKVCache`: sequences that come, go and share prefixes, in the blocks of one pool."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import torch

from ..runtime.signatures import public, shown
from .blocks import BlockPool
from .memory import CacheShape, Layers, check_bytes, check_sizes, counts_of, new_tokens, on_device
from .paged_attention import PagedAttention
from .sequences import Growth, PagedSequence, plan_growth
from .stats import CacheStats
from .step import CacheFullError, CacheStep
from .tables import Tables

__all__ = ["PagedKVCache"]


def _common_beginning(lists: list[list[int]]) -> int:
    """The length of the common prefix of all lists: that of the least and the greatest."""
    if not lists:
        return 0
    least, greatest = min(lists), max(lists)
    pairs = enumerate(zip(least, greatest, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(least), len(greatest)))


class PagedKVCache(PagedAttention):
    """A cache whose sequences take blocks of `block_size` tokens from a common pool as they grow, and can
    share them.

    Args:
        num_layers, num_blocks, num_kv_heads, head_dim: sizes; every layer has `num_blocks` blocks.
        block_size: tokens per block.
        value_dim: default `head_dim`.
        max_sequences: the largest number of sequences allocated at one time.
        dtype: of keys and values, and of the memory unless `kv_format` says otherwise.
        device: default "mps".
        kv_format: as in `StaticKVCache`.

    A sequence is a number, which `allocate` or `fork` returned and will not return again. After an error of
    any method, all sequences are as they were.
    """

    @public("PagedKVCache")
    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        block_size: int = 16,
        value_dim: int | None = None,
        max_sequences: int = 256,
        dtype: torch.dtype = torch.float16,
        device: torch.device | str = "mps",
        kv_format: str = "auto",
    ) -> None:
        name = "PagedKVCache"
        check_sizes(name, 1, block_size=block_size)
        check_sizes(name, 0, num_blocks=num_blocks, num_kv_heads=num_kv_heads, max_sequences=max_sequences)
        shape = (num_blocks, num_kv_heads, block_size)
        dims = (head_dim, head_dim if value_dim is None else value_dim)
        check_bytes(name, 4, max_sequences, num_blocks)
        self._layers = Layers(name, CacheShape(num_layers, shape, *dims, dtype, device, kv_format))
        self._block_size = block_size
        self._sequences: dict[int, PagedSequence] = {}
        self._next = 0
        self._change = 0
        self._pool = BlockPool(num_blocks)
        self._tables = Tables(num_blocks, max_sequences, device)

    def __repr__(self) -> str:
        stats = self.stats
        return (
            f"PagedKVCache({self._layers.words}, {stats.blocks} blocks of {self._block_size} tokens; "
            f"{stats.sequences} sequences, {stats.tokens} tokens, {stats.free_blocks} blocks free)"
        )

    @property
    def block_size(self) -> int:
        return self._block_size

    @property
    def free_blocks(self) -> int:
        return self._pool.available

    @property
    def sequences(self) -> tuple[int, ...]:
        return tuple(self._sequences)

    @property
    def stats(self) -> CacheStats:
        return CacheStats(
            blocks=self._pool.total,
            free_blocks=self._pool.available,
            shared_blocks=self._pool.shared,
            sequences=len(self._sequences),
            tokens=sum(sequence.length for sequence in self._sequences.values()),
            memory_bytes=self._tables.nbytes + self._layers.nbytes,
        )

    @public("PagedKVCache.length")
    def length(self, sequence: int) -> int:
        return self._get("length", sequence).length

    @public("PagedKVCache.blocks")
    def blocks(self, sequence: int) -> tuple[int, ...]:
        """The blocks of the pool that hold the sequence, in order."""
        return tuple(self._get("blocks", sequence).blocks)

    @public("PagedKVCache.allocate")
    def allocate(self) -> int:
        """A new sequence, without tokens or blocks. CacheFullError: there are max_sequences already."""
        return self._add(PagedSequence(self._new_row("allocate")))

    @public("PagedKVCache.fork")
    def fork(self, sequence: int) -> int:
        """A new sequence with the tokens of this one, in the same blocks. The first sequence that appends to
        a shared, partly filled block gets a copy of the block, so append the tokens of the last `extend`
        before you fork. CacheFullError: there are max_sequences already.
        """
        source = self._get("fork", sequence)
        row = self._new_row("fork")
        try:
            self._tables.copy_row(source.row, row)
        except BaseException:
            self._tables.free_row(row)
            raise
        self._pool.share(source.blocks)
        return self._add(PagedSequence(row, source.length, list(source.blocks)))

    @public("PagedKVCache.free")
    def free(self, sequence: int) -> None:
        """Frees the sequence, and its blocks unless others share them. ValueError: it is not allocated."""
        gone = self._get("free", sequence)
        del self._sequences[sequence]
        self._change += 1
        self._tables.free_row(gone.row)
        self._pool.release(gone.blocks)

    @public("PagedKVCache.truncate")
    def truncate(self, sequence: int, length: int) -> None:
        """Drops the newest tokens of the sequence, such as rejected drafts, so that `length` are left. Blocks
        without a token of it are released. Steps made before cannot be used for it any more.

        ValueError: the sequence has fewer tokens, or is not allocated.
        """
        cut = self._get("truncate", sequence)
        if not 0 <= length <= cut.length:
            raise ValueError(
                f"PagedKVCache.truncate: length {length} is not from 0 to {cut.length}, the tokens of "
                f"sequence {sequence}; pass how many to keep"
            )
        if length == cut.length:
            return
        self._tables.set_length(cut.row, length)
        self._change += 1
        cut.changed, cut.length = self._change, length
        kept = -(-length // self._block_size)
        self._pool.release(cut.blocks[kept:])
        del cut.blocks[kept:]

    @public("PagedKVCache.blocks_needed")
    def blocks_needed(self, sequences: Sequence[int], tokens: int | Sequence[int] = 1) -> int:
        """How many free blocks `extend` with these arguments would take, copies of shared blocks included: it
        succeeds if `free_blocks` is as large. ValueError: as in `extend`."""
        return sum(growth.blocks for growth in self._plan("blocks_needed", sequences, tokens))

    @public("PagedKVCache.extend")
    def extend(self, sequences: Sequence[int], tokens: int | Sequence[int] = 1) -> CacheStep:
        """Makes room for new tokens of these sequences: one number for all, or one for each.

        CacheFullError: the pool has too few free blocks. ValueError: a sequence is not allocated or given
        twice, or the numbers are not one for each.
        """
        plan = self._plan("extend", sequences, tokens)
        needed = sum(growth.blocks for growth in plan)
        if needed > self._pool.available:
            raise CacheFullError(
                f"PagedKVCache.extend: {needed} blocks of {self._block_size} tokens are needed and "
                f"{self._pool.available} of {self._pool.total} are free; free() a sequence, extend fewer, "
                "or make the cache larger"
            )
        taken = self._pool.take(needed)
        try:
            return self._grow(tuple(sequences), plan, taken)
        except BaseException:
            self._pool.release(taken)
            raise

    def _plan(self, method: str, sequences: Sequence[int], tokens: int | Sequence[int]) -> list[Growth]:
        name = f"PagedKVCache.{method}"
        if len(set(sequences)) != len(sequences):
            raise ValueError(f"{name}: sequences {list(sequences)} are not distinct; give each once")
        counts = counts_of(name, tokens, len(sequences))
        grown = [self._get(method, sequence) for sequence in sequences]
        return plan_growth(self._pool, self._block_size, grown, counts)

    def _grow(self, numbers: tuple[int, ...], plan: list[Growth], taken: list[int]) -> CacheStep:
        """Whatever can fail comes before the first change on the host."""
        grown = [growth.sequence for growth in plan]
        fresh = iter(taken)
        after = [self._grown_blocks(growth, fresh) for growth in plan]
        self._tables.begin(grown)
        for growth, blocks in zip(plan, after, strict=True):
            first = len(growth.sequence.blocks) - growth.copies_end
            if growth.copies_end:
                filled = growth.sequence.length % self._block_size
                self._layers.copy(growth.sequence.blocks[-1], blocks[first], filled)
            self._tables.write(growth.sequence.row, first, blocks[first:])

        device = self._tables.device
        counts = [growth.tokens for growth in plan]
        rows = on_device([sequence.row for sequence in grown], device)
        tables = self._tables.of(rows, max(map(len, after), default=0))
        before = self._tables.lengths[rows]
        new = new_tokens(counts, device)
        positions = before[new.sequence] + new.offset
        slot_blocks = tables[new.sequence, positions // self._block_size].long()
        lengths = (before + new.counts).int()
        step = CacheStep(
            sequences=numbers,
            lengths=tuple(growth.length for growth in plan),
            seq_lens=lengths,
            positions=positions,
            slot_mapping=slot_blocks * self._block_size + positions % self._block_size,
            block_tables=tables,
            cu_seqlens_q=new.starts,
            max_seqlen_q=max(counts, default=0),
            shared_blocks=_common_beginning(after),
            _cache=self,
            _change=self._change + 1,
        )
        self._tables.lengths[rows] = lengths

        self._change += 1
        for growth, blocks in zip(plan, after, strict=True):
            sequence = growth.sequence
            if growth.copies_end:
                self._pool.release(sequence.blocks[-1:])
            if growth.tokens > 0:
                sequence.changed, sequence.length, sequence.blocks = self._change, growth.length, blocks
        self._tables.done(grown)
        return step

    def _grown_blocks(self, growth: Growth, fresh: Iterator[int]) -> list[int]:
        kept = growth.sequence.blocks
        kept = kept[:-1] if growth.copies_end else kept
        return [*kept, *islice(fresh, growth.blocks)]

    def _get(self, method: str, sequence: int) -> PagedSequence:
        if sequence not in self._sequences:
            raise ValueError(
                f"PagedKVCache.{method}: sequence {shown(sequence)} is not allocated; pass a number that "
                "allocate() or fork() returned and free() has not released"
            )
        return self._sequences[sequence]

    def _new_row(self, method: str) -> int:
        row = self._tables.new_row()
        if row is None:
            raise CacheFullError(
                f"PagedKVCache.{method}: {len(self._sequences)} sequences are allocated, the most for this "
                "cache; free() one, or make it with a larger max_sequences"
            )
        return row

    def _add(self, sequence: PagedSequence) -> int:
        sequence.changed = self._change
        self._sequences[self._next] = sequence
        self._next += 1
        return self._next - 1

    def _check_current(self, method: str, step: CacheStep) -> None:
        if step._change == self._change:
            return
        for sequence in step.sequences:
            if self._get(method, sequence).changed > step._change:
                raise ValueError(
                    f"PagedKVCache.{method}: sequence {sequence} has changed since this step; use the step "
                    "of a later extend()"
                )
