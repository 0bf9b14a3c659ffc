"""`StaticKVCache`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from ..operators.attention import decode
from ..operators.options import DecodeOptions
from ..runtime.signatures import public
from .indices import counts_of, new_tokens
from .memory import CacheShape, Layers, check_sizes
from .step import CacheFullError, CacheStep

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["StaticKVCache"]


class StaticKVCache:
    """A dense cache for a fixed batch, with room for `capacity` tokens of each sequence.

    Args:
        num_layers, batch_size, capacity, num_kv_heads, head_dim: sizes.
        value_dim: default `head_dim`.
        dtype: of keys and values, and of the memory unless `kv_format` says otherwise.
        device: default "mps".
        kv_format: "auto" (as they are), "int8", "fp8_e4m3" or "int4"; the errors that these make are in
            `torch_fattn.cache_write`.

    Layer i is `keys(i)` `[batch, kv_heads, capacity, dim]`, of which the first `lengths[b]` are filled.
    """

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
    ) -> None:
        name = "StaticKVCache"
        check_sizes(name, 0, batch_size=batch_size, capacity=capacity, num_kv_heads=num_kv_heads)
        shape = (batch_size, num_kv_heads, capacity)
        dims = (head_dim, head_dim if value_dim is None else value_dim)
        self._layers = Layers(name, CacheShape(num_layers, shape, *dims, dtype, device, kv_format))
        self._capacity = capacity
        self._lengths = [0] * batch_size
        self._last: CacheStep | None = None
        self._seq_lens = torch.zeros(batch_size, dtype=torch.int32, device=device)

    @property
    def capacity(self) -> int:
        return self._capacity

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(self._lengths)

    @public("StaticKVCache.extend")
    def extend(self, tokens: int | Sequence[int]) -> CacheStep:
        """Makes room for new tokens of every sequence: one number for all, or one for each.

        CacheFullError: a sequence would exceed the capacity. ValueError: the numbers are not one for each
        sequence.
        """
        name = "StaticKVCache.extend"
        counts = counts_of(name, tokens, len(self._lengths))
        lengths = [length + count for length, count in zip(self._lengths, counts, strict=True)]
        for sequence, length in enumerate(lengths):
            if length > self._capacity:
                raise CacheFullError(
                    f"{name}: sequence {sequence} would have {length} tokens and the capacity is "
                    f"{self._capacity}; make the cache larger, or reset() it"
                )
        new = new_tokens(counts, self._seq_lens.device)
        positions = self._seq_lens[new.sequence] + new.offset
        self._lengths = lengths
        self._seq_lens = (self._seq_lens + new.counts).int()
        self._last = CacheStep(
            sequences=tuple(range(len(lengths))),
            lengths=tuple(lengths),
            seq_lens=self._seq_lens.clone(),  # the caller may write to it
            positions=positions,
            slot_mapping=new.sequence * self._capacity + positions,
            max_seqlen_q=max(counts, default=0),
            _cache=self._layers,
        )
        return self._last

    @public("StaticKVCache.append")
    def append(self, layer: int, step: CacheStep, key: Tensor, value: Tensor | None = None) -> None:
        """The keys `[tokens, kv_heads, head_dim]` and values `[tokens, kv_heads, value_dim]` of the step; no
        values if the cache is latent."""
        self._check("append", layer, step)
        tokens = step.slot_mapping.shape[0]
        rows = self._layers.new_rows("StaticKVCache.append", key, value, tokens)
        self._layers.write(layer, step.slot_mapping, *rows)
        step._appended.add(layer)

    @overload
    def decode(
        self,
        layer: int,
        step: CacheStep,
        query: Tensor,
        *,
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
        return_lse: bool,
        **options: Unpack[DecodeOptions],
    ) -> Tensor | tuple[Tensor, Tensor]: ...
    @public("StaticKVCache.decode", options="decode")
    def decode(
        self,
        layer: int,
        step: CacheStep,
        query: Tensor,
        *,
        return_lse: bool = False,
        **options: Unpack[DecodeOptions],
    ) -> Tensor | tuple[Tensor, Tensor]:
        """`torch_fattn.decode` of query `[batch, heads, rows, head_dim]`, the newest tokens, with its options
        and result."""
        self._check("decode", layer, step)
        step._check_appended("StaticKVCache.decode", layer)
        step._check_query("StaticKVCache.decode", query)
        self._layers.check_query("StaticKVCache.decode", query)
        stored: Any = {
            name: option.transpose(1, 2) if isinstance(option, Tensor) else option
            for name, option in self._layers.options(layer).items()
        }
        options.update(stored)
        operands = (query, self.keys(layer), self.values(layer), step.seq_lens)
        return decode(*operands, return_lse=return_lse, **options)

    @public("StaticKVCache.keys")
    def keys(self, layer: int) -> Tensor:
        self._layers.check("StaticKVCache.keys", layer)
        return self._layers.operands(layer)[0].transpose(1, 2)

    @public("StaticKVCache.values")
    def values(self, layer: int) -> Tensor:
        self._layers.check("StaticKVCache.values", layer)
        return self._layers.operands(layer)[1].transpose(1, 2)

    def reset(self) -> None:
        """Empties every sequence."""
        self._lengths = [0] * len(self._lengths)
        self._seq_lens = torch.zeros_like(self._seq_lens)
        self._last = None

    def _check(self, method: str, layer: int, step: CacheStep) -> None:
        self._layers.check(f"StaticKVCache.{method}", layer)
        step._check_cache(f"StaticKVCache.{method}", self._layers)
        if step is not self._last:
            raise ValueError(
                f"StaticKVCache.{method}: this step is not the last one; use what the last extend() returned"
            )
