"""`StaticKVCache`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..operators.attention import decode, paged_decode
from ..operators.options import CacheDecodeOptions
from ..operators.return_lse import method_with_lse
from ..runtime.signatures import public
from .kv_cache import CACHE, KVCache
from .memory import SIZES, CacheShape, Layers, check_sizes
from .sequences import CachedSequence
from .step import CacheFullError, CacheStep
from .tables import Tables

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

    @public("StaticKVCache", names=SIZES)
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
        self._capacity, self._block_size = capacity, max(capacity, 1)
        # Each sequence is a block of a pool: its row of the tables and its block are its number.
        self._tables = Tables(1, batch_size, self._block_size, device)
        self._sequences = [CachedSequence(row=number) for number in range(batch_size)]
        for own in self._sequences:
            self._tables.new_row()
            self._tables.write(own.row, 0, [own.row])

    def __repr__(self) -> str:
        return (
            f"StaticKVCache({self._layers.shape.words}, {len(self._sequences)} sequences of up to "
            f"{self._capacity} tokens; {sum(self.lengths)} tokens)"
        )

    @property
    def capacity(self) -> int:
        return self._capacity

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(own.length for own in self._sequences)

    @public("StaticKVCache.extend")
    def extend(self, sequences: Sequence[int] | None = None, *, tokens: int | Sequence[int]) -> CacheStep:
        """Makes room for new tokens of these sequences, by default of all: one number for all, or one for
        each.

        CacheFullError: a sequence would exceed the capacity. ValueError: the numbers are not one for each
        sequence, a sequence is given twice, or a layer does not have all its tokens (a layer without any
        token of any sequence does not count).
        """
        numbers = range(len(self._sequences)) if sequences is None else sequences
        growing, counts = self._growing("extend", numbers, tokens)
        for sequence, own, count in zip(numbers, growing, counts, strict=True):
            if own.length + count > self._capacity:
                raise CacheFullError(
                    f"StaticKVCache.extend: sequence {sequence} would have {own.length + count} tokens and "
                    f"the capacity is {self._capacity}; make the cache larger, or reset() it"
                )
        self._tables.begin(growing)
        after = [[own.row] for own in growing]
        step = self._new_step(numbers, growing, counts, after)
        for own, count, blocks in zip(growing, counts, after, strict=True):
            self._grow(step, own, count, blocks)
        self._tables.done(growing)
        return step

    @method_with_lse
    @public("StaticKVCache.decode", options="decode", names={**CACHE, "key has": "the cache has"})
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
            return self._decode_packed(self.decode, layer, step, query, return_lse, options)
        self._check_read("decode", layer, step, query)
        if step.sequences != tuple(range(len(self._sequences))):
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
        own = self._shrinking(sequence, length)
        if length != own.length:
            self._cut([own], length)

    @public("StaticKVCache.fork")
    def fork(self, sequence: int, target: int) -> None:
        """Copies a sequence's tokens to an empty one; first append the tokens of its last `extend`.
        ValueError: the target has tokens."""
        source, onto = (self._get("fork", each) for each in (sequence, target))
        if onto.length > 0:
            raise ValueError(
                f"StaticKVCache.fork: sequence {target} has {onto.length} tokens; reset() it first"
            )
        for memory in self._layers.tensors():
            memory[target, : source.length].copy_(memory[sequence, : source.length])
        self._tables.set_length(target, source.length)
        self._change += 1
        copy = source.fork(target)
        copy.blocks, copy.changed = [target], self._change
        copy.filled.freeze(self._layers.every)
        self._sequences[target] = copy

    @public("StaticKVCache.reset")
    def reset(self, sequence: int | None = None) -> None:
        """Empties a sequence, by default every one. The cache keeps its memory."""
        self._cut(self._sequences if sequence is None else [self._get("reset", sequence)], 0)

    def _get(self, method: str, sequence: int) -> CachedSequence:
        if not 0 <= sequence < len(self._sequences):
            raise IndexError(
                f"StaticKVCache.{method}: sequence {sequence} is not one of this cache's "
                f"{len(self._sequences)}; count from 0"
            )
        return self._sequences[sequence]
