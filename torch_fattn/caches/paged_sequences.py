"""`PagedSequences`: allocation, growth, sharing and release of a paged cache's sequences, and their `decode`,
with groups of sequences that share a prefix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..operators.attention import paged_decode
from ..operators.options import CacheDecodeOptions
from ..operators.return_lse import method_with_lse
from ..operators.shared_prefix import shared_prefix_paged_decode
from ..runtime.signatures import public, shown
from .blocks import GONE, BlockPool, block_keys, check_token_ids, first_difference
from .groups import Group, common_beginning, find_groups, in_order
from .kv_cache import CACHE, KVCache
from .memory import Layers
from .sequences import CachedSequence, Tail, Window, longest_prefix, plan_copies
from .step import CacheFullError, CacheStep
from .tables import Tables

if TYPE_CHECKING:
    from typing_extensions import Unpack


class PagedSequences(KVCache):
    """Methods of `PagedKVCache`, which documents them as its own."""

    _name = "PagedKVCache"

    def __init__(self, layers: Layers, max_sequences: int, window: Window) -> None:
        num_blocks, _, block_size = layers.shape.shape
        self._layers = layers
        self._window = window
        self._block_size = block_size
        self._sequences: dict[int, CachedSequence] = {}
        self._next = 0
        self._epoch = 0
        self._prefix_hits = self._prefix_misses = 0
        self._pool = BlockPool(num_blocks)
        self._tables = Tables(num_blocks, max_sequences, block_size, layers.shape.device)

    @property
    def block_size(self) -> int:
        return self._block_size

    @property
    def free_blocks(self) -> int:
        return self._pool.available

    @property
    def sequences(self) -> tuple[int, ...]:
        return tuple(self._sequences)

    @public("PagedKVCache.length")
    def length(self, sequence: int) -> int:
        return self._get("length", sequence, swapped=True).length

    @public("PagedKVCache.blocks")
    def blocks(self, sequence: int) -> tuple[int, ...]:
        """The blocks of the pool that hold the sequence, in order; -1 for blocks that its window has left."""
        return tuple(self._get("blocks", sequence, swapped=True).blocks)

    @public("PagedKVCache.allocate", any_text=True)
    def allocate(self, token_ids: Sequence[int] | None = None, *, salt: str = "") -> int:
        """Creates a sequence. With the `token_ids` of a prompt, it begins with the longest prefix of whole
        blocks that `commit` registered for these tokens, `length` tokens long. The last token is never
        included, so that one row is left to compute.

        Args:
            salt: whatever else keys and values depend on: an adapter, the hash of an image. Only prefixes
                with the same salt are found.

        CacheFullError: max_sequences are in use.
        """
        sequence = CachedSequence(row=-1, salt=salt, epoch=self._epoch)
        if token_ids is not None:
            check_token_ids("PagedKVCache.allocate", token_ids)
            keys = list(block_keys(token_ids[:-1], self._block_size, salt))
            found = [self._pool.find(key) for key in keys]
            sequence.blocks = longest_prefix(found, self._window, self._block_size)
            sequence.keys = keys[: len(sequence.blocks)]
            missed = len(keys) - len(sequence.keys)
            sequence.length = len(sequence.blocks) * self._block_size
            sequence.token_ids += token_ids[: sequence.length]
            sequence.hidden = self._window.hidden(sequence.length, self._block_size)[1]
        sequence.row = self._new_row("allocate", sequence)
        if token_ids is not None:
            self._prefix_hits += len(sequence.keys)
            self._prefix_misses += missed
        return self._add(sequence)

    @public("PagedKVCache.commit")
    def commit(self, sequence: int, token_ids: Sequence[int]) -> None:
        """Registers the sequence's whole blocks, so that `allocate` finds them by their tokens. After `free`
        they stay until the pool evicts them, least recently used first. Only blocks that every layer has
        appended are registered; call it again for the others.

        Args:
            token_ids: the sequence's tokens, from the first. Tokens beyond its length are ignored.

        ValueError: the tokens differ from those of earlier calls.
        """
        name = "PagedKVCache.commit"
        own = self._get("commit", sequence)
        check_token_ids(name, token_ids)
        if (n := first_difference(own.token_ids, token_ids)) is not None:
            raise ValueError(
                f"{name}: token_ids[{n}] is {token_ids[n]}, and {own.token_ids[n]} before; pass the tokens "
                f"of sequence {sequence} from its first on"
            )
        if own.epoch != self._epoch:  # keys computed before clear_prefixes()
            return
        known = token_ids[: self._filled_length(own)]
        first = len(own.keys)
        own.keys += block_keys(known, self._block_size, own.salt, own.keys)
        self._register(own, first)
        own.token_ids += known[len(own.token_ids) : len(own.keys) * self._block_size]

    def _filled_length(self, sequence: CachedSequence) -> int:
        """The number of tokens that every layer has."""
        gap = sequence.filled.gap(self._layers.every, sequence.length)
        return sequence.length if gap is None else gap[1]

    def _register(self, sequence: CachedSequence, first: int = 0) -> None:
        """Registers its blocks from `first` on."""
        for index, key in enumerate(sequence.keys[first:], first):
            if sequence.is_whole(index, self._block_size):
                self._pool.register(sequence.blocks[index], key)

    @public("PagedKVCache.clear_prefixes")
    def clear_prefixes(self) -> None:
        """Forgets all registered blocks. Call it when the model's weights change. Current sequences keep
        their tokens, but `commit` no longer registers their blocks."""
        self._pool.forget_all()
        self._epoch += 1

    @public("PagedKVCache.fork")
    def fork(self, sequence: int) -> int:
        """Creates a sequence that shares this one's blocks. The first sequence to append to a shared, partly
        filled block gets a copy of it, so append the tokens of the last `extend` before forking.
        CacheFullError: max_sequences are in use.
        """
        source = self._get("fork", sequence)
        return self._add(source.fork(self._new_row("fork", source)))

    @public("PagedKVCache.free")
    def free(self, sequence: int) -> None:
        """Frees the sequence and its unshared blocks. ValueError: it is not allocated."""
        gone = self._get("free", sequence, swapped=True)
        del self._sequences[sequence]
        self._change += 1
        self._tables.free_row(gone.row)
        self._pool.release(gone.blocks)

    @public("PagedKVCache.truncate")
    def truncate(self, sequence: int, length: int) -> None:
        """Keeps the first `length` tokens of the sequence: drops rejected drafts, or a step that failed
        between two layers. Empty blocks are released. Earlier steps can no longer be used for it.

        ValueError: the sequence has fewer tokens, or is not allocated.
        """
        cut = self._shrinking(sequence, length)
        _, hidden = self._window.hidden(length, self._block_size)
        seen = max(hidden, self._window.sink_blocks(self._block_size))
        released = max(cut.hidden * self._block_size, cut.missing.stop)
        first_seen = max(length - 1 - self._window.left, 0)
        sees_missing = cut.missing.start < length and first_seen < cut.missing.stop
        if sees_missing or seen < min(cut.hidden, -(-length // self._block_size)):
            least = released + self._window.left + 1
            raise ValueError(
                f"PagedKVCache.truncate: rows after {length} tokens of sequence {sequence} see some "
                f"that its window has released; keep at least {least} tokens, or none"
            )
        if length != cut.length:
            self._pool.release(self._cut([cut], length))

    @public("PagedKVCache.blocks_needed")
    def blocks_needed(self, sequences: Sequence[int], tokens: int | Sequence[int] = 1) -> int:
        """The number of free blocks that `extend` would take, copies of shared blocks included: it succeeds
        if `free_blocks` is at least this. ValueError: as in `extend`."""
        return sum(map(self._new_blocks, self._plan("blocks_needed", sequences, tokens)))

    @public("PagedKVCache.extend")
    def extend(self, sequences: Sequence[int], tokens: int | Sequence[int] = 1) -> CacheStep:
        """Makes room for new tokens of these sequences: one number for all, or one for each.

        CacheFullError: the pool has too few free blocks. ValueError: a sequence is not allocated or given
        twice, the numbers are not one for each, or a layer does not have all tokens of a sequence (a layer
        without any token of any sequence does not count).
        """
        plan = self._plan("extend", sequences, tokens)
        taken = self._take("extend", sum(map(self._new_blocks, plan)))
        grown, counts = [tail.sequence for tail in plan], [tail.length - tail.begin for tail in plan]
        try:  # everything that can fail precedes the first change on the host
            after = self._write(plan, taken)
            shared = common_beginning(after) if self._window.left < 0 else 0
            step = self._new_step(sequences, grown, counts, after, shared)
        except BaseException:
            self._pool.release(taken)
            raise
        for tail, own, count, blocks in zip(plan, grown, counts, after, strict=True):
            self._release_copied(tail)
            hidden = self._window.hidden(own.length, self._block_size)
            self._grow(step, own, count, blocks)
            if count > 0:
                self._pool.release(own.hide(*hidden))
        self._tables.done(grown)
        return step

    def _plan(self, method: str, sequences: Sequence[int], tokens: int | Sequence[int]) -> list[Tail]:
        pairs = zip(*self._growing(method, sequences, tokens), strict=True)
        plan = [Tail(own, own.length, (), own.length + count) for own, count in pairs]
        plan_copies(self._pool, self._block_size, plan)
        return plan

    def _new_blocks(self, tail: Tail) -> int:
        return tail.new_blocks(self._block_size)

    def _take(self, method: str, needed: int) -> list[int]:
        if needed > self._pool.available:
            raise CacheFullError(
                f"PagedKVCache.{method}: {needed} blocks of {self._block_size} tokens are needed and "
                f"{self._pool.available} of {self._pool.total} are free; free() a sequence, extend fewer, "
                "or make the cache larger"
            )
        return self._pool.take(needed)

    def _write(self, plan: Sequence[Tail], taken: list[int]) -> list[list[int]]:
        """Writes blocks to the tables and moves tokens. Returns the blocks of each sequence, which the host
        does not have yet."""
        fresh = iter(taken)
        after = [tail.blocks(fresh, self._block_size) for tail in plan]
        self._tables.begin([tail.sequence for tail in plan])
        moves: list[tuple[int, int]] = []
        for tail, blocks in zip(plan, after, strict=True):
            for n in tail.copied:
                self._tables.write(tail.sequence.row, n, blocks[n : n + 1])
            end = len(tail.sequence.blocks)
            self._tables.write(tail.sequence.row, end, blocks[end:])
            moves += tail.moves(blocks, self._block_size)
        if moves:
            self._layers.move(*zip(*moves, strict=True))
        return after

    def _release_copied(self, tail: Tail) -> None:
        """Releases the blocks that were copied, and removes the keys of those that were written."""
        for n in tail.written(self._block_size):
            block = tail.sequence.blocks[n]
            if n in tail.copied:
                self._pool.release([block])
            else:
                self._pool.forget(block)

    def _get(self, method: str, sequence: int, *, swapped: bool = False) -> CachedSequence:
        if sequence not in self._sequences:
            raise ValueError(
                f"PagedKVCache.{method}: sequence {shown(sequence)} is not allocated; pass a number that "
                "allocate() or fork() returned and free() has not released"
            )
        if self._sequences[sequence].swapped is not None and not swapped:
            raise ValueError(
                f"PagedKVCache.{method}: sequence {sequence} is swapped out; call swap_in({sequence}) first"
            )
        return self._sequences[sequence]

    def _new_row(self, method: str, sequence: CachedSequence) -> int:
        """A new table row with the sequence's blocks and length, copied from its row if it has one."""
        row = self._tables.new_row()
        if row is None:
            raise CacheFullError(
                f"PagedKVCache.{method}: {len(self._sequences)} sequences are allocated, the most for this "
                "cache; free() one, or make it with a larger max_sequences"
            )
        try:
            if sequence.row < 0:
                self._tables.write(row, 0, [max(block, 0) for block in sequence.blocks])
                self._tables.set_length(row, sequence.length)
            else:
                self._tables.copy_row(sequence.row, row, len(sequence.blocks))
        except BaseException:
            self._tables.free_row(row)
            raise
        return row

    def _add(self, sequence: CachedSequence) -> int:
        """Adds the sequence as a user of its blocks."""
        self._pool.share(sequence.blocks)
        sequence.changed = self._change
        self._sequences[self._next] = sequence
        self._next += 1
        return self._next - 1

    @method_with_lse
    @public("PagedKVCache.decode", options="paged_decode", names=CACHE)
    def decode(
        self,
        layer: int,
        step: CacheStep,
        query: Tensor,
        *,
        shared_prefix: bool = False,
        return_lse: bool = False,
        **options: Unpack[CacheDecodeOptions],
    ) -> Tensor | tuple[Tensor, Tensor]:
        """`torch_fattn.paged_decode` of query `[batch, heads, rows, head_dim]`, the newest tokens of the
        step's sequences, with its options and result. Packed rows `[tokens, heads, head_dim]`, the same
        number for each sequence, give packed results.

        With `shared_prefix`, sequences that begin with the same blocks form groups, and each group reads its
        common blocks once (`torch_fattn.shared_prefix_paged_decode`). A result may then depend, in its last
        bits, on sequences with the same first block. Use it for long common prompts: a group adds a second
        decode and a merge.
        """
        if query.dim() == 3:
            packed = {**options, "shared_prefix": shared_prefix}
            return self._decode_packed(self.decode, layer, step, query, return_lse, packed)
        self._check_read("decode", layer, step, query)
        self._check_window(step, query)
        self._add_options("decode", layer, options)
        key, value = self._layers.operands(layer)
        tables, seq_lens = step.block_tables, step.seq_lens
        groups = self._find_groups(step, query.shape[2]) if shared_prefix else []
        if not any(group.blocks for group in groups):
            return paged_decode(query, key, value, tables, seq_lens, return_lse=return_lse, **options)
        results = []
        for group in groups:
            operands = (group.of(query), key, value, group.of(tables), group.of(seq_lens), group.blocks)
            own: Any = {**options, **_of_sequences(group, options)}
            results.append(shared_prefix_paged_decode(*operands, return_lse=True, **own))
        outs, lses = zip(*results, strict=True)
        if options.get("token_major_out"):
            out = in_order([each.transpose(1, 2) for each in outs], groups).transpose(1, 2)
        else:
            out = in_order(outs, groups)
        return (out, in_order(lses, groups)) if return_lse else out

    def _check_window(self, step: CacheStep, query: Tensor) -> None:
        fewest = min(step._counts, default=0)
        if self._window.left >= 0 and query.shape[2] > max(fewest, 1):
            raise ValueError(
                f"{self._name}.decode: query has {query.shape[2]} rows of each sequence and one has {fewest} "
                "new tokens, before which its window has released keys; pass all new tokens of the step to "
                f"{self._name}.prefill, packed as its keys are"
            )

    def _find_groups(self, step: CacheStep, rows: int) -> list[Group]:
        """Groups by whole visible blocks before the first row."""
        if rows not in step._groups:
            tables = []
            for sequence in map(self._sequences.__getitem__, step.sequences):
                whole = max(sequence.length - rows, 0) // self._block_size
                blocks = sequence.blocks[:whole]
                tables.append(blocks[: blocks.index(GONE)] if sequence.hidden and GONE in blocks else blocks)
            step._groups[rows] = find_groups(tables)
        return step._groups[rows]

    def _add_options(self, method: str, layer: int, options: Any) -> None:
        """Adds the cache's window too, since older blocks are gone."""
        super()._add_options(method, layer, options)
        if self._window.left < 0:
            return
        for name, own in (("window_left", self._window.left), ("sink_tokens", self._window.sink_tokens)):
            if options.setdefault(name, own) != own:
                raise ValueError(
                    f"PagedKVCache.{method}: {name} {options[name]} is not {own}, for which the cache keeps "
                    "blocks; leave it out"
                )


def _of_sequences(group: Group, options: Any) -> dict[str, Tensor]:
    """The per-sequence options of the group's members."""
    tree = options.get("tree_mask")
    of_tree = 3 if tree is not None and tree.dtype == torch.bool else 2
    dims = {"attn_mask": 4, "tree_mask": of_tree, "alibi_slopes": 2}
    given = ((name, options.get(name), dim) for name, dim in dims.items())
    return {
        name: group.of(option)
        for name, option, dim in given
        if isinstance(option, Tensor) and option.dim() == dim and option.shape[0] > 1
    }
