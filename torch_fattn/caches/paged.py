"""`PagedKVCache`: sequences that come, go and share prefixes, in the blocks of one pool."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import torch

from ..runtime.signatures import public, shown
from .blocks import GONE
from .files import Saved, SavedSequence, read, write
from .memory import SIZES, CacheShape, Layers, check_bytes, check_sizes
from .paged_sequences import PagedSequences
from .sequences import CachedSequence, Swapped, Tail, Window, plan_copies
from .step import CacheStep


@dataclass(frozen=True)
class CacheStats:
    """Statistics of a `PagedKVCache`. All are host numbers: reading them does not wait for the GPU."""

    blocks: int  # of the pool
    free_blocks: int  # that new tokens can take
    shared_blocks: int  # that several sequences use
    cached_blocks: int  # that `allocate` finds by their tokens, in use or free
    sequences: int
    swapped: int  # sequences in host memory
    tokens: int  # of all sequences; shared tokens count once per sequence
    prefix_hits: int  # blocks that `allocate` found since the cache was made
    prefix_misses: int  # whole blocks of prompts that it did not find
    evictions: int  # registered blocks that were reused for other tokens
    memory_bytes: int  # keys, values, scales and tables, on the device


class PagedKVCache(PagedSequences):
    """A paged cache: sequences take blocks of `block_size` tokens from one pool as they grow, and can share
    blocks.

    Args:
        num_layers, num_blocks, num_kv_heads, head_dim: sizes; every layer has `num_blocks` blocks.
        block_size: tokens per block.
        value_dim: default `head_dim`.
        max_sequences: the largest number of sequences at one time.
        dtype: of keys and values, and of the memory if `kv_format` is "auto".
        device: default "mps".
        kv_format: as in `StaticKVCache`.
        latent: values are the first `value_dim` columns of keys and are not stored (multi-head latent
            attention).
        window_left, sink_tokens: options of every `decode` and `prefill` of this cache. `extend` releases
            blocks that no row will see again. If only some layers of a model have a window, use one cache for
            each kind of layer.

    A sequence is a number that `allocate` or `fork` returned; numbers are never reused. A method that raises
    leaves all sequences unchanged. A step that fails between two layers leaves its tokens in some layers,
    until the others append them or `truncate` drops them.
    """

    @public("PagedKVCache", names=SIZES)
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
        latent: bool = False,
        window_left: int = -1,
        sink_tokens: int = 0,
    ) -> None:
        name = "PagedKVCache"
        check_sizes(name, 1, block_size=block_size)
        check_sizes(name, 0, num_blocks=num_blocks, num_kv_heads=num_kv_heads, max_sequences=max_sequences)
        shape = (num_blocks, num_kv_heads, block_size)
        dims = (head_dim, head_dim if value_dim is None else value_dim)
        check_bytes(name, 4, max_sequences, num_blocks)
        check_sizes(name, -1, window_left=window_left)
        check_sizes(name, 0, sink_tokens=sink_tokens)
        layers = Layers(name, CacheShape(num_layers, shape, *dims, dtype, device, kv_format, latent))
        super().__init__(layers, max_sequences, Window(window_left, sink_tokens))

    def __repr__(self) -> str:
        stats = self.stats
        return (
            f"PagedKVCache({self._layers.shape.words}, {stats.blocks} blocks of {self._block_size} tokens; "
            f"{stats.sequences} sequences, {stats.tokens} tokens, {stats.free_blocks} blocks free)"
        )

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
            swapped=sum(each.swapped is not None for each in self._sequences.values()),
            tokens=sum(sequence.length for sequence in self._sequences.values()),
            memory_bytes=self._tables.nbytes + self._layers.nbytes,
        )

    @public("PagedKVCache.accept")
    def accept(self, step: CacheStep, accepted: Sequence[Sequence[int]]) -> None:
        """Keeps some of the step's new tokens, such as the accepted path of a draft tree, and drops the
        others. In every layer, kept tokens move next to the tokens before. Empty blocks are released.

        Args:
            step: the last step of its sequences, appended in every layer in use.
            accepted: for each sequence of the step, the indices of the new tokens to keep, increasing from 0.

        CacheFullError: a kept token moves to a shared block, and no block is free for the copy.
        ValueError: invalid indices, or the step is not the last one.
        """
        plan = self._plan_accept(step, accepted)
        changed = [tail.sequence for tail in plan]
        taken = self._take("accept", sum(map(self._new_blocks, plan)))
        try:
            after = self._write(plan, taken)
            for tail in plan:
                self._tables.set_length(tail.sequence.row, tail.length)
        except BaseException:
            self._pool.release(taken)
            raise
        self._change += 1
        for tail, own, blocks in zip(plan, changed, after, strict=True):
            self._release_copied(tail)
            own.drop_keys(tail.first, self._block_size)
            own.changed, own.blocks = self._change, blocks
            self._pool.release(own.cut(tail.length, self._block_size))
        self._tables.done(changed)

    def _plan_accept(self, step: CacheStep, accepted: Sequence[Sequence[int]]) -> list[Tail]:
        """Those of sequences that drop tokens."""
        name = "PagedKVCache.accept"
        for layer in sorted(self._layers.written) or [0]:
            self._check_step("accept", layer, step)
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
            own = self._sequences[number]
            if len(kept) < count:
                begin = own.length - count
                plan.append(Tail(own, begin, kept, begin + len(kept)))
        plan_copies(self._pool, self._block_size, plan)
        return plan

    @public("PagedKVCache.swap_out")
    def swap_out(self, sequence: int) -> None:
        """Moves the sequence to host memory and releases its blocks. It keeps its number and length; until
        `swap_in`, only `length`, `blocks` and `free` take it. Shared blocks are copied. Waits for the GPU."""
        own = self._get("swap_out", sequence)
        places = [place for place, block in enumerate(own.blocks) if block != GONE]
        rows = self._layers.read(own.slots(self._block_size))
        self._change += 1
        own.changed, own.swapped = self._change, Swapped(places, rows)
        own.filled.freeze(self._layers.every)  # a step shared with the fork's source writes to other blocks
        self._pool.release(own.blocks)
        own.blocks = [GONE] * len(own.blocks)

    @public("PagedKVCache.swap_in")
    def swap_in(self, sequence: int) -> None:
        """Moves a sequence back to the GPU, into unshared blocks. Waits for the GPU.

        CacheFullError: the pool has too few free blocks. ValueError: the sequence is not swapped out.
        """
        own = self._get("swap_in", sequence, swapped=True)
        if own.swapped is None:
            raise ValueError(f"PagedKVCache.swap_in: sequence {sequence} is not swapped out; use it as it is")
        taken = self._take("swap_in", len(own.swapped.places))
        back = replace(own, blocks=[*own.blocks])
        for place, block in zip(own.swapped.places, taken, strict=True):
            back.blocks[place] = block
        try:
            self._layers.restore(back.slots(self._block_size), own.swapped.rows)
            self._tables.begin([own])
            self._tables.write(own.row, 0, [max(block, 0) for block in back.blocks])
        except BaseException:
            self._pool.release(taken)
            raise
        self._change += 1
        own.changed, own.blocks, own.swapped = self._change, back.blocks, None
        self._tables.done([own])
        if own.epoch == self._epoch:
            self._register(own)

    @public("PagedKVCache.save")
    def save(self, path: str | os.PathLike[str], sequences: Sequence[int] | None = None) -> None:
        """Writes these sequences, by default all, to a safetensors file (package safetensors), with the token
        ids of blocks that `commit` registered. Shared blocks are stored once. The file is written atomically.
        Waits for the GPU.

        ValueError: a sequence is not allocated or swapped out, or not every layer has its tokens. OSError:
        the file cannot be written.
        """
        numbers = self.sequences if sequences is None else sequences
        saved = [self._get("save", number) for number in numbers]
        for number, own in zip(numbers, saved, strict=True):
            self._check_filled("save", number, self._layers.every, own.length)
        rows: dict[int, int] = {}  # of each slot
        slots = [dict(own.places(self._block_size)) for own in saved]  # by position
        for slot in chain.from_iterable(where.values() for where in slots):
            rows.setdefault(slot, len(rows))
        listed = [
            SavedSequence(
                rows=[rows[where[n]] if n in where else -1 for n in range(own.length)],
                token_ids=own.token_ids if own.epoch == self._epoch else [],
                salt=own.salt,
            )
            for own, where in zip(saved, slots, strict=True)
        ]
        memory = self._layers.read([*rows])
        write("PagedKVCache.save", Path(path), self._layers, self._window, Saved(memory, listed))

    @public("PagedKVCache.load")
    def load(self, path: str | os.PathLike[str]) -> tuple[int, ...]:
        """Loads the sequences of a file from `save` as new sequences, in order; `block_size` and pool sizes
        may differ. Their prefixes are registered: free() the sequences if only later prompts need them. Waits
        for the GPU.

        CacheFullError: too few free blocks or sequences. ValueError: the file is damaged or from another kind
        of cache. OSError: it cannot be read.
        """
        name, size = "PagedKVCache.load", self._block_size
        saved = read(name, Path(path), self._layers, self._window)
        chunks_of = [each.chunks(self._window, size) for each in saved.sequences]
        chunks = dict.fromkeys(chunk for own in chunks_of for chunk in own if chunk)
        taken = self._take("load", len(chunks))
        blocks = dict(zip(chunks, taken, strict=True))
        added: list[CachedSequence] = []
        try:
            slots = [(blocks[chunk] * size + n, row) for chunk in chunks for n, row in enumerate(chunk)]
            kept = [(slot, row) for slot, row in slots if row >= 0]
            index = torch.tensor([row for _, row in kept], dtype=torch.int64, device="cpu")
            self._layers.restore([slot for slot, _ in kept], [memory[index] for memory in saved.memory])
            self._layers.written |= self._layers.every
            for each, in_order in zip(saved.sequences, chunks_of, strict=True):
                table = [blocks[chunk] if chunk else GONE for chunk in in_order]
                own = each.in_blocks(table, self._window, size, self._epoch)
                own.row = self._new_row("load", own)
                added.append(own)
        except BaseException:
            self._pool.release(taken)
            for own in added:
                self._tables.free_row(own.row)
            raise
        numbers = tuple(self._add(own) for own in added)
        self._pool.release(taken)
        for own in added:
            self._register(own)
        return numbers
