"""`StaticKVCache`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from ..operators.attention import decode, paged_decode
from ..operators.options import CacheDecodeOptions
from ..runtime.signatures import is_checked, public
from .filled import Filled
from .indices import counts_of, new_tokens, on_device
from .kv_cache import KVCache
from .memory import CacheShape, Layers, check_sizes
from .step import CacheFullError, CacheStep

if TYPE_CHECKING:
    from typing_extensions import Unpack


class StaticKVCache(KVCache):
    """A dense cache for a fixed batch, with room for `capacity` tokens of each sequence.

    Args:
        num_layers, batch_size, capacity, num_kv_heads, head_dim: sizes.
        value_dim: default `head_dim`.
        dtype: of keys and values, and of the memory if `kv_format` is "auto".
        device: default "mps".
        kv_format: "auto" (stored unchanged), "int8", "fp8_e4m3" or "int4"; `torch_fattn.cache_write` lists
            their errors.
        latent: values are the first `value_dim` columns of keys and are not stored (multi-head latent
            attention).

    Layer i is `keys(i)` `[batch, kv_heads, capacity, dim]`, of which the first `lengths[b]` are filled.
    """

    _name = "StaticKVCache"

    @public("StaticKVCache")
    def __init__(
        self,
        num_layers: int,
        batch_size: int,
        capacity: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        value_dim: int | None = None,
        dtype: torch.dtype = torch.float16,
        device: torch.device | str = "mps",
        kv_format: str = "auto",
        latent: bool = False,
    ) -> None:
        name = "StaticKVCache"
        check_sizes(name, 0, batch_size=batch_size, capacity=capacity, num_kv_heads=num_kv_heads)
        shape = (batch_size, num_kv_heads, capacity)
        dims = (head_dim, head_dim if value_dim is None else value_dim)
        self._layers = Layers(name, CacheShape(num_layers, shape, *dims, dtype, device, kv_format, latent))
        self._capacity = capacity
        self._lengths = [0] * batch_size
        self._change = 0
        self._changed = [0] * batch_size
        self._filled_of = [Filled() for _ in range(batch_size)]
        self._seq_lens = torch.zeros(batch_size, dtype=torch.int32, device=device)

    def __repr__(self) -> str:
        return (
            f"StaticKVCache({self._layers.shape.words}, {len(self._lengths)} sequences of up to "
            f"{self._capacity} tokens; {sum(self._lengths)} tokens)"
        )

    @property
    def capacity(self) -> int:
        return self._capacity

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(self._lengths)

    @public("StaticKVCache.extend")
    def extend(self, sequences: Sequence[int] | None = None, *, tokens: int | Sequence[int]) -> CacheStep:
        """Makes room for new tokens of these sequences, by default of all: one number for all, or one for
        each.

        CacheFullError: a sequence would exceed the capacity. ValueError: the numbers are not one for each
        sequence, a sequence is given twice, or a layer does not have all its tokens (a layer without any
        token of any sequence does not count).
        """
        name = "StaticKVCache.extend"
        grown = range(len(self._lengths)) if sequences is None else [*sequences]
        for sequence in grown:
            self._check_sequence("extend", sequence)
        if len({*grown}) != len(grown):
            raise ValueError(f"{name}: sequences {list(grown)} are not distinct; give each once")
        counts = counts_of(name, tokens, len(grown))
        for sequence in grown:
            self._check_filled("extend", sequence, self._layers.written, self._lengths[sequence])
        lengths = [self._lengths[sequence] + count for sequence, count in zip(grown, counts, strict=True)]
        for sequence, length in zip(grown, lengths, strict=True):
            if length > self._capacity:
                raise CacheFullError(
                    f"{name}: sequence {sequence} would have {length} tokens and the capacity is "
                    f"{self._capacity}; make the cache larger, or reset() it"
                )
        device = self._seq_lens.device
        rows = on_device(grown, device)
        new = new_tokens(counts, device)
        before = self._seq_lens[rows]
        positions = before[new.sequence] + new.offset
        after = (before + new.counts).int()
        seq_lens = self._seq_lens.clone()
        seq_lens[rows] = after
        step = CacheStep(
            sequences=tuple(grown),
            lengths=tuple(lengths),
            seq_lens=after,
            positions=positions,
            slot_mapping=rows[new.sequence] * self._capacity + positions,
            block_tables=rows[:, None].int(),
            cu_seqlens_q=new.starts,
            max_seqlen_q=max(counts, default=0),
            _layers=self._layers,
            _counts=tuple(counts),
            _change=self._change + 1,
            _lacking=frozenset().union(*(self._filled_of[s].lacking(self._layers.every) for s in grown)),
        )
        if is_checked():
            self._layers.erase(step.slot_mapping)
        self._change, self._seq_lens = step._change, seq_lens
        for sequence, length, count in zip(grown, lengths, counts, strict=True):
            if count > 0:
                self._filled_of[sequence].add(length - count, step._appended, self._layers.every)
                self._lengths[sequence], self._changed[sequence] = length, self._change
        return step

    @overload
    def decode(
        self,
        layer: int,
        step: CacheStep,
        query: Tensor,
        *,
        return_lse: Literal[False] = ...,
        **options: Unpack[CacheDecodeOptions],
    ) -> Tensor: ...
    @overload
    def decode(
        self,
        layer: int,
        step: CacheStep,
        query: Tensor,
        *,
        return_lse: Literal[True],
        **options: Unpack[CacheDecodeOptions],
    ) -> tuple[Tensor, Tensor]: ...
    @overload
    def decode(
        self,
        layer: int,
        step: CacheStep,
        query: Tensor,
        *,
        return_lse: bool,
        **options: Unpack[CacheDecodeOptions],
    ) -> Tensor | tuple[Tensor, Tensor]: ...
    @public("StaticKVCache.decode", options="decode")
    def decode(
        self,
        layer: int,
        step: CacheStep,
        query: Tensor,
        *,
        return_lse: bool = False,
        **options: Unpack[CacheDecodeOptions],
    ) -> Tensor | tuple[Tensor, Tensor]:
        """`torch_fattn.decode` of query `[batch, heads, rows, head_dim]`, the newest tokens, with its options
        and result. Packed rows `[tokens, heads, head_dim]`, the same number for each sequence, give packed
        results."""
        if query.dim() == 3:
            out, lse = self._decode_packed(self.decode, layer, step, query, options)
            return (out, lse) if return_lse else out
        self._check_decode(layer, step, query, options)
        if step.sequences != tuple(range(len(self._lengths))):  # treat each sequence as a block of a pool
            self._add_options("decode", layer, options)
            pool = self._layers.operands(layer)
            return paged_decode(
                query, *pool, step.block_tables, step.seq_lens, return_lse=return_lse, **options
            )
        stored: Any = {
            name: option.transpose(1, 2) if isinstance(option, Tensor) else option
            for name, option in self._layers.options(layer).items()
        }
        options.update(stored)
        operands = (query, self.keys(layer), self.values(layer), step.seq_lens)
        return decode(*operands, return_lse=return_lse, **options)

    @public("StaticKVCache.keys")
    def keys(self, layer: int) -> Tensor:
        """A view of the layer's keys as they are stored, `[batch, kv_heads, capacity, columns]`."""
        self._layers.check("StaticKVCache.keys", layer)
        return self._layers.operands(layer)[0].transpose(1, 2)

    @public("StaticKVCache.values")
    def values(self, layer: int) -> Tensor:
        """A view of the layer's values as they are stored."""
        self._layers.check("StaticKVCache.values", layer)
        return self._layers.operands(layer)[1].transpose(1, 2)

    @public("StaticKVCache.truncate")
    def truncate(self, sequence: int, length: int) -> None:
        """Keeps the first `length` tokens of the sequence: drops rejected drafts, or a step that failed
        between two layers. Earlier steps can no longer be used for it. ValueError: it has fewer tokens."""
        self._check_sequence("truncate", sequence)
        if not 0 <= length <= self._lengths[sequence]:
            raise ValueError(
                f"StaticKVCache.truncate: length {length} is not from 0 to {self._lengths[sequence]}, the "
                f"tokens of sequence {sequence}; pass how many to keep"
            )
        if length != self._lengths[sequence]:
            self._set_length(sequence, length)

    @public("StaticKVCache.fork")
    def fork(self, sequence: int, target: int) -> None:
        """Copies a sequence's tokens to an empty one; first append the tokens of its last `extend`.
        ValueError: the target has tokens."""
        for each in (sequence, target):
            self._check_sequence("fork", each)
        if self._lengths[target] > 0:
            raise ValueError(
                f"StaticKVCache.fork: sequence {target} has {self._lengths[target]} tokens; reset() it first"
            )
        length = self._lengths[sequence]
        for memory in self._layers.tensors():
            memory[target, :length].copy_(memory[sequence, :length])
        self._set_length(target, length)
        self._filled_of[target] = self._filled_of[sequence].copy()
        self._filled_of[target].freeze(self._layers.every)

    @public("StaticKVCache.reset")
    def reset(self, sequence: int | None = None) -> None:
        """Empties a sequence, by default every one. The cache keeps its memory."""
        if sequence is not None:
            self._check_sequence("reset", sequence)
            self._set_length(sequence, 0)
            return
        self._seq_lens = torch.zeros_like(self._seq_lens)
        self._change += 1
        self._lengths = [0] * len(self._lengths)
        self._changed = [self._change] * len(self._lengths)
        for filled in self._filled_of:
            filled.cut(0)

    def _set_length(self, sequence: int, length: int) -> None:
        seq_lens = self._seq_lens.clone()
        seq_lens[sequence].fill_(length)
        self._seq_lens = seq_lens
        self._change += 1
        self._lengths[sequence], self._changed[sequence] = length, self._change
        self._filled_of[sequence].cut(length)

    def _check_sequence(self, method: str, sequence: int) -> None:
        if not 0 <= sequence < len(self._lengths):
            raise IndexError(
                f"StaticKVCache.{method}: sequence {sequence} is not one of this cache's "
                f"{len(self._lengths)}; count from 0"
            )

    def _last_change(self, method: str, sequence: int) -> int:
        return self._changed[sequence]

    def _filled(self, method: str, sequence: int) -> Filled:
        return self._filled_of[sequence]

    def _places(self, sequence: int) -> Iterator[tuple[int, int]]:
        first = sequence * self._capacity
        return ((position, first + position) for position in range(self._lengths[sequence]))
