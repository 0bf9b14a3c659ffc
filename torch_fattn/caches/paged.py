"""`PagedKVCache`: sequences that come, go and share prefixes, in the blocks of one pool."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import torch

from ..runtime.signatures import public, shown
from .accepted import Acceptance
from .blocks import BlockPool
from .memory import CacheShape, Layers, check_bytes, check_sizes, counts_of
from .paged_attention import PagedAttention
from .prefixes import block_keys, check_token_ids, first_difference
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
        self._epoch = 0
        self._prefix_hits = self._prefix_misses = 0
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
            cached_blocks=self._pool.cached,
            prefix_hits=self._prefix_hits,
            prefix_misses=self._prefix_misses,
            evictions=self._pool.evictions,
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
    def allocate(self, token_ids: Sequence[int] | None = None, *, salt: str = "") -> int:
        """A new sequence. With the `token_ids` of a prompt, it begins with the longest prefix of whole blocks
        that `commit` registered for these tokens; `length` says how many it has. The last token is never
        among them, so that there is a row to compute.

        Args:
            salt: whatever else keys and values depend on: an adapter, the hash of an image. A prefix is found
                with the salt with which its sequence was allocated.

        CacheFullError: there are max_sequences already.
        """
        sequence = PagedSequence(row=-1, salt=salt, epoch=self._epoch)
        if token_ids is not None:
            check_token_ids("PagedKVCache.allocate", token_ids)
            for key in block_keys(token_ids[:-1], self._block_size, salt):
                block = self._pool.find(key)
                if block is None:
                    break
                sequence.blocks.append(block)
                sequence.keys.append(key)
            sequence.length = sequence.filled = len(sequence.blocks) * self._block_size
            sequence.token_ids += token_ids[: sequence.length]
        sequence.row = self._new_row("allocate", sequence)
        if token_ids is not None:
            self._prefix_hits += len(sequence.blocks)
            self._prefix_misses += max(len(token_ids) - 1, 0) // self._block_size - len(sequence.blocks)
        return self._add(sequence)

    @public("PagedKVCache.commit")
    def commit(self, sequence: int, token_ids: Sequence[int]) -> None:
        """Registers the sequence's whole blocks, so that `allocate` finds them by their tokens, also after
        `free`: then until the pool needs them, the least recently used first. Only blocks that every layer
        has appended are registered; call it again later for others.

        Args:
            token_ids: of the sequence, from its first token on. Others behind its length are ignored.

        ValueError: the tokens are not those of earlier calls.
        """
        name = "PagedKVCache.commit"
        own = self._get("commit", sequence)
        check_token_ids(name, token_ids)
        if (n := first_difference(own.token_ids, token_ids)) is not None:
            raise ValueError(
                f"{name}: token_ids[{n}] is {token_ids[n]}, and {own.token_ids[n]} before; pass the tokens "
                f"of sequence {sequence} from its first on"
            )
        if own.epoch != self._epoch:  # its keys are those of a model before clear_prefixes()
            return
        known = token_ids[: own.filled]
        first = len(own.keys)
        keys = list(block_keys(known, self._block_size, own.salt, own.keys))
        for block, key in zip(own.blocks[first:], keys, strict=False):
            self._pool.register(block, key)
        own.keys += keys
        own.token_ids += known[len(own.token_ids) : len(own.keys) * self._block_size]

    @public("PagedKVCache.clear_prefixes")
    def clear_prefixes(self) -> None:
        """Forgets all registered blocks, as a change of the model's weights requires. The sequences of now
        keep their tokens, and `commit` registers nothing of them any more."""
        self._pool.forget_all()
        self._epoch += 1

    @public("PagedKVCache.fork")
    def fork(self, sequence: int) -> int:
        """A new sequence with the tokens of this one, in the same blocks. The first sequence that appends to
        a shared, partly filled block gets a copy of the block, so append the tokens of the last `extend`
        before you fork. CacheFullError: there are max_sequences already.
        """
        source = self._get("fork", sequence)
        return self._add(source.fork(self._new_row("fork", source)))

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
        cut.changed = self._change
        self._pool.release(cut.cut(length, self._block_size))

    @public("PagedKVCache.accept")
    def accept(self, step: CacheStep, accepted: Sequence[Sequence[int]]) -> None:
        """Keeps some of the step's new tokens, such as the accepted path in a tree of drafts, and drops the
        others. In every layer, the kept ones move next to the tokens before. Blocks without a token are
        released.

        Args:
            step: the last one of its sequences, appended in every layer.
            accepted: for each of its sequences, the new tokens to keep, as increasing numbers from 0.

        CacheFullError: a kept token moves to a block that a fork shares, and no block is free for a copy.
        ValueError: the numbers are no such tokens, or the step is not the last one.
        """
        plan = self._plan_accept(step, accepted)
        changed = [each for each in plan if not each.is_all]
        taken = self._take("accept", sum(len(each.copied) for each in plan))
        try:
            fresh = iter(taken)
            after = [each.blocks(list(islice(fresh, len(each.copied)))) for each in changed]
            self._tables.begin([each.sequence for each in changed])
            for each, blocks in zip(changed, after, strict=True):
                for index in each.copied:
                    self._tables.write(each.sequence.row, index, blocks[index : index + 1])
                self._tables.set_length(each.sequence.row, each.length)
            pairs = zip(changed, after, strict=True)
            moves = [pair for each, blocks in pairs for pair in each.slots(blocks, self._block_size)]
            if moves:
                self._layers.move(*zip(*moves, strict=True))
        except BaseException:
            self._pool.release(taken)
            raise
        self._change += 1
        for each, blocks in zip(changed, after, strict=True):
            for block in each.written(self._block_size):
                self._pool.forget(block)
            shared = [each.sequence.blocks[index] for index in each.copied]
            each.sequence.changed, each.sequence.blocks = self._change, blocks
            self._pool.release(shared + each.sequence.cut(each.length, self._block_size))
        self._tables.done([each.sequence for each in changed])

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
        taken = self._take("extend", sum(growth.blocks for growth in plan))
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

    def _plan_accept(self, step: CacheStep, accepted: Sequence[Sequence[int]]) -> list[Acceptance]:
        name = "PagedKVCache.accept"
        self._check("accept", 0, step)
        for layer in range(len(self._layers)):
            step._check_appended(name, layer)
        if len(accepted) != len(step.sequences):
            raise ValueError(
                f"{name}: accepted has {len(accepted)} lists for {len(step.sequences)} sequences; give one "
                "for each"
            )
        plan = []
        for number, count, kept in zip(step.sequences, step._counts, accepted, strict=True):
            if list(kept) != sorted({n for n in kept if 0 <= n < count}):
                raise ValueError(
                    f"{name}: accepted has {shown(list(kept))} for sequence {number}, which has {count} new "
                    "tokens; pass increasing numbers from 0"
                )
            plan.append(Acceptance(self._sequences[number], count, kept))
            plan[-1].plan(self._pool, self._block_size)
        return plan

    def _take(self, method: str, needed: int) -> list[int]:
        if needed > self._pool.available:
            raise CacheFullError(
                f"PagedKVCache.{method}: {needed} blocks of {self._block_size} tokens are needed and "
                f"{self._pool.available} of {self._pool.total} are free; free() a sequence, extend fewer, "
                "or make the cache larger"
            )
        return self._pool.take(needed)

    def _grow(self, numbers: tuple[int, ...], plan: list[Growth], taken: list[int]) -> CacheStep:
        """Whatever can fail comes before the first change on the host."""
        grown, counts = [growth.sequence for growth in plan], [growth.tokens for growth in plan]
        fresh = iter(taken)
        after = [self._grown_blocks(growth, fresh) for growth in plan]
        self._tables.begin(grown)
        moves = []
        for growth, blocks in zip(plan, after, strict=True):
            first = len(growth.sequence.blocks) - growth.copies_end
            if growth.copies_end:
                old, new = (block * self._block_size for block in (growth.sequence.blocks[-1], blocks[first]))
                moves += [(old + n, new + n) for n in range(growth.sequence.length % self._block_size)]
            self._tables.write(growth.sequence.row, first, blocks[first:])
        if moves:
            self._layers.move(*zip(*moves, strict=True))
        tensors = self._tables.extended(grown, counts, max(map(len, after), default=0), self._block_size)

        lengths = tuple(growth.length for growth in plan)
        self._change += 1
        for growth, blocks in zip(plan, after, strict=True):
            sequence = growth.sequence
            if growth.copies_end:
                self._pool.release(sequence.blocks[-1:])
            elif growth.tokens > 0 and sequence.length % self._block_size != 0:
                self._pool.forget(sequence.blocks[-1])
            if growth.tokens > 0:
                sequence.changed, sequence.length, sequence.blocks = self._change, growth.length, blocks
        self._tables.done(grown)
        return CacheStep(
            sequences=numbers,
            lengths=lengths,
            max_seqlen_q=max(counts, default=0),
            shared_blocks=_common_beginning(after),
            _cache=self,
            _counts=tuple(counts),
            _change=self._change,
            **tensors,
        )

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

    def _new_row(self, method: str, sequence: PagedSequence) -> int:
        """A row with the blocks and the length of the sequence, in whose own row they are already."""
        row = self._tables.new_row()
        if row is None:
            raise CacheFullError(
                f"PagedKVCache.{method}: {len(self._sequences)} sequences are allocated, the most for this "
                "cache; free() one, or make it with a larger max_sequences"
            )
        try:
            if sequence.row < 0:
                self._tables.write(row, 0, sequence.blocks)
                self._tables.set_length(row, sequence.length)
            else:
                self._tables.copy_row(sequence.row, row)
        except BaseException:
            self._tables.free_row(row)
            raise
        return row

    def _add(self, sequence: PagedSequence) -> int:
        """The sequence, with its row, becomes a user of its blocks."""
        self._pool.share(sequence.blocks)
        sequence.changed = self._change
        self._sequences[self._next] = sequence
        self._next += 1
        return self._next - 1

    def _note_filled(self, step: CacheStep) -> None:
        for number, length, count in zip(step.sequences, step.lengths, step._counts, strict=True):
            if self._sequences[number].filled == length - count:
                self._sequences[number].filled = length

    def _check_current(self, method: str, step: CacheStep) -> None:
        if step._change == self._change:
            return
        for sequence in step.sequences:
            if self._get(method, sequence).changed > step._change:
                raise ValueError(
                    f"PagedKVCache.{method}: sequence {sequence} has changed since this step; use the step "
                    "of a later extend()"
                )
