"""`PagedKVCache`: sequences that come, go and share prefixes, in the blocks of one pool."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from ..operators.attention import MAX_DECODE_ROWS, paged_decode, paged_prefill
from ..operators.options import DecodeOptions, PagedPrefillOptions
from ..operators.shared_prefix import shared_prefix_paged_decode
from ..runtime.signatures import check_tensor, public, shown
from .memory import (
    CacheShape,
    Layers,
    check_bytes,
    check_sizes,
    counts_of,
    fill,
    new_tokens,
    on_device,
)
from .step import CacheFullError, CacheStep

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["PagedKVCache"]


FIRST_ROWS = 256  # of a new cache's tables


def _common_beginning(lists: list[list[int]]) -> int:
    """The length of the common prefix of all lists: that of the least and the greatest."""
    if not lists:
        return 0
    least, greatest = min(lists), max(lists)
    pairs = enumerate(zip(least, greatest, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(least), len(greatest)))


@dataclass
class _PagedSequence:
    row: int  # row in the device's tables
    length: int = 0
    blocks: list[int] = field(default_factory=list)


class PagedKVCache:
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

    A sequence is a number, which `allocate` or `fork` returned and will not return again.
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
        self._num_blocks = num_blocks
        self._sequences: dict[int, _PagedSequence] = {}
        self._next = 0
        self._change = 0
        self._users = Counter[int]()  # for every block in use
        self._free_blocks = list(range(num_blocks - 1, -1, -1))
        self._max_sequences = max_sequences
        self._free_rows: list[int] = []
        self._tables = torch.empty(0, num_blocks, dtype=torch.int32, device=device)
        self._seq_lens = torch.empty(0, dtype=torch.int32, device=device)
        self._add_rows(min(max_sequences, FIRST_ROWS))

    @property
    def free_blocks(self) -> int:
        return len(self._free_blocks)

    @property
    def sequences(self) -> tuple[int, ...]:
        return tuple(self._sequences)

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
        number = self._add("allocate", _PagedSequence(row=-1))
        self._seq_lens[self._sequences[number].row].zero_()
        return number

    @public("PagedKVCache.fork")
    def fork(self, sequence: int) -> int:
        """A new sequence with the tokens of this one, in the same blocks. The first sequence that appends to
        a shared, partly filled block gets a copy of the block, so append the tokens of the last `extend`
        before you fork. CacheFullError: there are max_sequences already.
        """
        source = self._get("fork", sequence)
        copy = _PagedSequence(row=-1, length=source.length, blocks=list(source.blocks))
        number = self._add("fork", copy)
        self._users.update(copy.blocks)
        self._tables[copy.row].copy_(self._tables[source.row])
        self._seq_lens[copy.row].copy_(self._seq_lens[source.row])
        return number

    @public("PagedKVCache.free")
    def free(self, sequence: int) -> None:
        """Frees the sequence, and its blocks unless others share them. ValueError: it is not allocated."""
        gone = self._get("free", sequence)
        del self._sequences[sequence]
        self._change += 1
        self._free_rows.append(gone.row)
        for block in reversed(gone.blocks):
            self._release(block)

    @public("PagedKVCache.extend")
    def extend(self, sequences: Sequence[int], tokens: int | Sequence[int] = 1) -> CacheStep:
        """Makes room for new tokens of these sequences: one number for all, or one for each.

        CacheFullError: the pool has too few free blocks. ValueError: a sequence is not allocated or given
        twice, or the numbers are not one for each. The cache is unchanged after an error.
        """
        name = "PagedKVCache.extend"
        if len(set(sequences)) != len(sequences):
            raise ValueError(f"{name}: sequences {list(sequences)} are not distinct; give each once")
        counts = counts_of(name, tokens, len(sequences))
        grown = [self._get("extend", sequence) for sequence in sequences]
        needed = self._blocks_needed(grown, counts)
        if needed > len(self._free_blocks):
            raise CacheFullError(
                f"{name}: {needed} blocks of {self._block_size} tokens are needed and "
                f"{len(self._free_blocks)} of {self._num_blocks} are free; free() a sequence, extend fewer, "
                "or make the cache larger"
            )
        self._change += 1
        for sequence, count in zip(grown, counts, strict=True):
            self._grow(sequence, count)

        device = self._tables.device
        rows = on_device([sequence.row for sequence in grown], device)
        longest = max((len(sequence.blocks) for sequence in grown), default=0)
        tables = self._tables[:, :longest][rows]
        before = self._seq_lens[rows]
        new = new_tokens(counts, device)
        after = (before + new.counts).int()
        self._seq_lens[rows] = after
        positions = before[new.sequence] + new.offset
        blocks = tables[new.sequence, positions // self._block_size].long()
        return CacheStep(
            sequences=tuple(sequences),
            lengths=tuple(sequence.length for sequence in grown),
            seq_lens=after,
            positions=positions,
            slot_mapping=blocks * self._block_size + positions % self._block_size,
            block_tables=tables,
            cu_seqlens_q=new.starts,
            max_seqlen_q=max(counts, default=0),
            shared_blocks=_common_beginning([sequence.blocks for sequence in grown]),
            _cache=self,
            _change=self._change,
        )

    @public("PagedKVCache.append")
    def append(self, layer: int, step: CacheStep, key: Tensor, value: Tensor) -> None:
        """The keys `[tokens, kv_heads, head_dim]` and values `[tokens, kv_heads, value_dim]` of the step."""
        self._check("append", layer, step)
        self._layers.check_new("PagedKVCache.append", key, value, step.slot_mapping.shape[0])
        self._layers.write(layer, step.slot_mapping, key, value)
        step._appended.add(layer)

    @overload
    def decode(
        self,
        layer: int,
        step: CacheStep,
        query: Tensor,
        *,
        shared_prefix: bool = ...,
        return_lse: Literal[False] = ...,
        **options: Unpack[DecodeOptions],
    ) -> Tensor: ...
    @overload
    def decode(
        self,
        layer: int,
        step: CacheStep,
        query: Tensor,
        *,
        shared_prefix: bool = ...,
        return_lse: Literal[True],
        **options: Unpack[DecodeOptions],
    ) -> tuple[Tensor, Tensor]: ...
    @overload
    def decode(
        self,
        layer: int,
        step: CacheStep,
        query: Tensor,
        *,
        shared_prefix: bool = ...,
        return_lse: bool,
        **options: Unpack[DecodeOptions],
    ) -> Tensor | tuple[Tensor, Tensor]: ...
    @public("PagedKVCache.decode", options="paged_decode")
    def decode(
        self,
        layer: int,
        step: CacheStep,
        query: Tensor,
        *,
        shared_prefix: bool = False,
        return_lse: bool = False,
        **options: Unpack[DecodeOptions],
    ) -> Tensor | tuple[Tensor, Tensor]:
        """`torch_fattn.paged_decode` of query `[batch, heads, rows, head_dim]`, the newest tokens of the
        step's sequences, with its options and result.

        With `shared_prefix`, the leading blocks common to all these sequences are read once for the batch
        (`torch_fattn.shared_prefix_paged_decode`). Use it for forks of a long prompt: it adds a second decode
        and a merge if there are such blocks.
        """
        self._check("decode", layer, step)
        step._check_appended("PagedKVCache.decode", layer)
        step._check_query("PagedKVCache.decode", query)
        self._layers.check_query("PagedKVCache.decode", query)
        if query.shape[2] > MAX_DECODE_ROWS:
            raise NotImplementedError(
                f"PagedKVCache.decode: {query.shape[2]} query rows per sequence are above {MAX_DECODE_ROWS}; "
                "pass all new tokens of the step to PagedKVCache.prefill, packed as its keys are"
            )
        assert step.block_tables is not None
        key, value = self._layers.operands(layer)
        stored: Any = self._layers.options(layer)
        options.update(stored)
        operands = (query, key, value, step.block_tables, step.seq_lens)
        if shared_prefix and len(step.sequences) > 1:
            # Whole blocks of keys that come before all rows.
            before_rows = (min(step.lengths) - query.shape[2]) // self._block_size
            shared = max(min(step.shared_blocks, before_rows), 0)
            return shared_prefix_paged_decode(*operands, shared, return_lse=return_lse, **options)
        return paged_decode(*operands, return_lse=return_lse, **options)

    @overload
    def prefill(
        self,
        layer: int,
        step: CacheStep,
        query: Tensor,
        *,
        return_lse: Literal[False] = ...,
        **options: Unpack[PagedPrefillOptions],
    ) -> Tensor: ...
    @overload
    def prefill(
        self,
        layer: int,
        step: CacheStep,
        query: Tensor,
        *,
        return_lse: Literal[True],
        **options: Unpack[PagedPrefillOptions],
    ) -> tuple[Tensor, Tensor]: ...
    @overload
    def prefill(
        self,
        layer: int,
        step: CacheStep,
        query: Tensor,
        *,
        return_lse: bool,
        **options: Unpack[PagedPrefillOptions],
    ) -> Tensor | tuple[Tensor, Tensor]: ...
    @public("PagedKVCache.prefill", options="paged_prefill")
    def prefill(
        self,
        layer: int,
        step: CacheStep,
        query: Tensor,
        *,
        return_lse: bool = False,
        **options: Unpack[PagedPrefillOptions],
    ) -> Tensor | tuple[Tensor, Tensor]:
        """`torch_fattn.paged_prefill` of query `[tokens, heads, head_dim]`, all new tokens of the step as its
        keys are, with its options and result."""
        self._check("prefill", layer, step)
        step._check_appended("PagedKVCache.prefill", layer)
        check_tensor("PagedKVCache.prefill", "query", query, "[tokens, heads, head_dim]")
        tokens = step.slot_mapping.shape[0]
        if query.dim() != 3:
            raise ValueError(
                f"PagedKVCache.prefill: query has {query.dim()} dimensions; its shape must be "
                "[tokens, heads, head_dim]"
            )
        if query.shape[0] != tokens:
            raise ValueError(
                f"PagedKVCache.prefill: query has {query.shape[0]} rows and the step {tokens} new tokens; "
                "pass one row for each"
            )
        self._layers.check_query("PagedKVCache.prefill", query)
        assert step.block_tables is not None and step.cu_seqlens_q is not None
        operands = (*self._layers.operands(layer), step.block_tables, step.seq_lens, step.cu_seqlens_q)
        stored: Any = self._layers.options(layer)
        options.update(stored)
        return paged_prefill(query, *operands, step.max_seqlen_q, return_lse=return_lse, **options)

    def _get(self, method: str, sequence: int) -> _PagedSequence:
        if sequence not in self._sequences:
            raise ValueError(
                f"PagedKVCache.{method}: sequence {shown(sequence)} is not allocated; pass a number that "
                "allocate() or fork() returned and free() has not released"
            )
        return self._sequences[sequence]

    def _add(self, method: str, sequence: _PagedSequence) -> int:
        if not self._free_rows:
            rows = len(self._seq_lens)
            self._add_rows(min(rows, self._max_sequences - rows))
        if not self._free_rows:
            raise CacheFullError(
                f"PagedKVCache.{method}: {len(self._sequences)} sequences are allocated, the most for this "
                "cache; free() one, or make it with a larger max_sequences"
            )
        sequence.row = self._free_rows.pop()
        self._sequences[self._next] = sequence
        self._next += 1
        return self._next - 1

    @torch.inference_mode(False)  # they outlive inference mode and are written outside it too
    def _add_rows(self, count: int) -> None:
        """Adds rows to the tables. `max_sequences` by itself allocates nothing."""
        first = len(self._seq_lens)
        self._tables = torch.cat((self._tables, self._tables.new_full((count, self._num_blocks), -1)))
        self._seq_lens = torch.cat((self._seq_lens, self._seq_lens.new_zeros(count)))
        self._free_rows += range(first + count - 1, first - 1, -1)

    def _check(self, method: str, layer: int, step: CacheStep) -> None:
        self._layers.check(f"PagedKVCache.{method}", layer)
        step._check_cache(f"PagedKVCache.{method}", self)
        if step._change == self._change:
            return
        for sequence, length in zip(step.sequences, step.lengths, strict=True):
            if self._get(method, sequence).length != length:
                raise ValueError(
                    f"PagedKVCache.{method}: sequence {sequence} has grown since this step; use the step of "
                    "its last extend()"
                )

    def _shares_its_end(self, sequence: _PagedSequence, users: Counter[int]) -> bool:
        return sequence.length % self._block_size != 0 and users[sequence.blocks[-1]] > 1

    def _blocks_needed(self, sequences: list[_PagedSequence], counts: list[int]) -> int:
        """How many blocks are needed: new ones, and copies of shared, partly filled ones, which the last of
        their sequences keeps."""
        users, needed = Counter[int](), 0
        for sequence, count in zip(sequences, counts, strict=True):
            if count == 0:
                continue
            needed += -(-(sequence.length + count) // self._block_size) - len(sequence.blocks)
            if sequence.length % self._block_size != 0:
                end = sequence.blocks[-1]
                users.setdefault(end, self._users[end])
                if users[end] > 1:
                    needed += 1
                    users[end] -= 1
        return needed

    def _grow(self, sequence: _PagedSequence, count: int) -> None:
        """Takes free blocks; the caller has checked that there are enough."""
        if count == 0:
            return
        if self._shares_its_end(sequence, self._users):
            self._copy_end(sequence)
        first = len(sequence.blocks)
        sequence.length += count
        new = [self._take() for _ in range(-(-sequence.length // self._block_size) - first)]
        sequence.blocks += new
        fill(self._tables[sequence.row, first : first + len(new)], new)

    def _copy_end(self, sequence: _PagedSequence) -> None:
        shared, own = sequence.blocks[-1], self._take()
        filled = sequence.length % self._block_size
        for memory in self._layers.tensors():
            memory[own, :filled].copy_(memory[shared, :filled])
        sequence.blocks[-1] = own
        self._tables[sequence.row, len(sequence.blocks) - 1].fill_(own)
        self._release(shared)

    def _take(self) -> int:
        block = self._free_blocks.pop()
        self._users[block] = 1
        return block

    def _release(self, block: int) -> None:
        self._users[block] -= 1
        if self._users[block] == 0:
            del self._users[block]
            self._free_blocks.append(block)
