"""Memory of the layers, for both cache classes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..operators import DTYPES
from ..operators.cache_write import cache_write
from ..operators.kv_formats import KV_FORMATS, check_format
from ..runtime.tensor_checks import check_available
from .tables import on_device

SIZES = {  # names of the constructors' arguments in the errors of `cache_write`
    "key head_dim": "head_dim",
    "key_cache head_dim": "head_dim",
    "value head_dim": "value_dim",
    "value_cache head_dim": "value_dim",
    "pad key and its cache": "pad keys",
    "pad value and its cache": "pad values",
}


def check_sizes(name: str, least: int, **sizes: int) -> None:
    for what, size in sizes.items():
        if size < least:
            raise ValueError(f"{name}: {what} {size} is not a size; give {least} or more")


def check_bytes(name: str, itemsize: int, *shape: int) -> None:
    if math.prod(max(size, 1) for size in shape) * itemsize > 2**63 - 1:
        raise ValueError(
            f"{name}: {' x '.join(map(str, shape))} numbers are more than 2^63 bytes, the largest tensor of "
            "torch; give smaller sizes"
        )


@dataclass(frozen=True)
class CacheShape:
    """The sizes of a cache. A layer's keys or values have the shape `[blocks, kv_heads, slots, dim]`."""

    num_layers: int
    shape: tuple[int, ...]
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device | str
    kv_format: str
    is_latent: bool = False  # values are the first columns of keys

    def check(self, name: str) -> None:
        check_sizes(name, 1, num_layers=self.num_layers, head_dim=self.head_dim, value_dim=self.value_dim)
        check_bytes(name, 4, self.num_layers, *self.shape, max(self.head_dim, self.value_dim))
        if self.is_latent and self.value_dim > self.head_dim:
            raise ValueError(
                f"{name}: value_dim {self.value_dim} is above head_dim {self.head_dim}, and the values of a "
                f"latent cache are the first columns of its keys; give at most {self.head_dim}"
            )
        check_available(name, self.device)
        check_format(name, self.kv_format, "auto")
        if self.dtype not in DTYPES.values():
            raise TypeError(
                f"{name}: dtype {self.dtype} is not torch.float32, torch.float16 or torch.bfloat16; give one "
                "of them, and a kv_format to store keys and values in fewer bits"
            )
        # `cache_write` has the errors for sizes of heads.
        _, operands, options = replace(self, shape=(1, 1, 1)).layer()
        key, value = (
            torch.empty(0, 1, dim, dtype=self.dtype, device=self.device)
            for dim in (self.head_dim, self.value_dim)
        )
        if self.is_latent:
            value = key[..., : self.value_dim]
        slots = torch.empty(0, dtype=torch.int64, device=self.device)
        cache_write(key, value, *operands, slots, **options)

    @property
    def stored(self) -> str:
        return str(self.dtype) if self.kv_format == "auto" else self.kv_format

    @property
    def words(self) -> str:
        values = f"values the first {self.value_dim}" if self.is_latent else f"values of {self.value_dim}"
        return (
            f"{self.num_layers} layers of {self.shape[1]} key-value heads, keys of {self.head_dim} and "
            f"{values} columns, {self.stored} on {self.device}"
        )

    @torch.inference_mode(False)  # the cache outlives inference mode
    def layer(self) -> tuple[list[Tensor], tuple[Tensor, Tensor], dict[str, Any]]:
        """Allocates a layer. Returns its memory, keys and values, and their scales and format as options, all
        with slots before heads."""
        sides = [self._side(self.head_dim)]
        sides += [] if self.is_latent else [self._side(self.value_dim)]
        (key, key_scales), (value, value_scales) = sides[0], sides[-1]
        if self.is_latent:
            kind = KV_FORMATS.get(self.kv_format)
            value = key[..., : self.value_dim // (kind.packed if kind else 1)]
            if key_scales is not None and kind is not None and kind.group:
                value_scales = key_scales[..., : self.value_dim // kind.group, :]
        options: dict[str, Any] = {}
        if key_scales is not None:
            options = {"key_scales": key_scales, "value_scales": value_scales, "kv_format": self.kv_format}
        return [each for side in sides for each in side if each is not None], (key, value), options

    def _side(self, dim: int) -> tuple[Tensor, Tensor | None]:
        """Keys or values, and their scales."""
        if self.kv_format == "auto":
            memory = torch.empty(*self.shape, dim, dtype=self.dtype, device=self.device)
            return memory.transpose(1, 2), None
        kind = KV_FORMATS[self.kv_format]
        shape, dtype = kind.scales(self.shape, dim)
        memory = torch.empty(*self.shape, kind.columns(dim), dtype=kind.dtype, device=self.device)
        return memory.transpose(1, 2), torch.empty(shape, dtype=dtype, device=self.device).transpose(1, 2)


_ERASED = 0xFF  # bytes of an unwritten key: a NaN, or codes that `cache_write` never stores


class Layers:
    """The keys and values of every layer, as views with slots before heads. In memory, the slots of a head
    are contiguous."""

    def __init__(self, name: str, shape: CacheShape) -> None:
        shape.check(name)
        self._operands: list[tuple[Tensor, Tensor]] = []
        self._options: list[dict[str, Any]] = []
        self.shape = shape
        self._memory: list[Tensor] = []
        self.every = frozenset(range(shape.num_layers))
        self.written: set[int] = set()  # layers that have been written
        for _ in range(shape.num_layers):
            memory, operands, options = shape.layer()
            self._memory += memory
            self._operands.append(operands)
            self._options.append(options)

    def __len__(self) -> int:
        return len(self._operands)

    def check(self, method: str, layer: int) -> None:
        if not 0 <= layer < len(self._operands):
            raise IndexError(
                f"{method}: layer {layer} is not one of this cache's {len(self._operands)}; count from 0"
            )

    def operands(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values, `[blocks, slots, kv_heads, columns]`."""
        return self._operands[layer]

    def options(self, layer: int) -> dict[str, Any]:
        """Scales and format as keyword arguments; empty for an unquantised cache."""
        return self._options[layer]

    def tensors(self) -> Sequence[Tensor]:
        """All memory, `[blocks, slots, kv_heads, ..]`: keys, their scales, values and theirs, by layers."""
        return self._memory

    @property
    def device(self) -> torch.device:
        return self._memory[0].device

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())

    def read(self, slots: Sequence[int]) -> list[Tensor]:
        """Copies the rows of these slots to host memory. Waits for the device."""
        index = self._index(slots)
        return [memory[index].cpu() for memory in self.tensors()]

    def restore(self, slots: Sequence[int], rows: Sequence[Tensor]) -> None:
        """Writes what `read` returned to these slots."""
        index = self._index(slots)
        for memory, own in zip(self.tensors(), rows, strict=True):
            memory[index] = own.to(self.device)

    def _index(self, slots: Sequence[int]) -> tuple[Tensor, Tensor]:
        numbers = on_device(slots, self.device)
        return numbers // self.shape.shape[2], numbers % self.shape.shape[2]

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies rows from slots to slots, in every layer. An error leaves all unchanged."""
        source_index, target_index = self._index(sources), self._index(targets)
        self._put(self.tensors(), target_index, [memory[source_index] for memory in self.tensors()])

    def _put(self, memory: Sequence[Tensor], index: tuple[Tensor, Tensor], rows: Sequence[Any]) -> None:
        """Writes rows of each tensor. An error leaves all unchanged."""
        old = [each[index] for each in memory]
        try:
            for each, own in zip(memory, rows, strict=True):
                each[index] = own
        except BaseException:
            for each, own in zip(memory, old, strict=True):
                each[index] = own
            raise

    def new_rows(self, method: str, key: Tensor, value: Tensor | None) -> tuple[Tensor, Tensor]:
        """The keys and values of new tokens."""
        if self.shape.is_latent and value is not None:
            raise ValueError(f"{method}: value is given, and a latent cache takes it from key; leave it out")
        if value is None and not self.shape.is_latent:
            raise TypeError(f"{method}: value is None; pass a tensor, or make the cache with latent=True")
        for what, rows in (("key", key), ("value", value)):
            if rows is not None:
                self.check_kind(method, what, rows)
        return key, key[..., : self.shape.value_dim] if value is None else value

    def check_kind(self, method: str, what: str, rows: Tensor) -> None:
        """Checks device and dtype: the operator's own errors advise to convert the cache. A quantised cache
        takes rows of every supported dtype."""
        device = self.device
        if rows.device != device and rows.is_meta:
            raise ValueError(f"{method}: {what} is on meta, which has no data; pass a tensor with data")
        if rows.device != device:
            raise ValueError(
                f"{method}: {what} is on {rows.device} and the cache on {device}; move it with "
                f'.to("{device}"), the cache\'s device'
            )
        dtype = self.shape.dtype
        if rows.dtype != dtype and (self.shape.kv_format == "auto" or rows.dtype not in DTYPES.values()):
            raise TypeError(
                f"{method}: {what} is {rows.dtype} and the cache {dtype}; convert it with .to({dtype}), the "
                "cache's dtype"
            )

    def erase(self, slots: Tensor) -> None:
        """Marks the keys of these slots as unwritten in every layer; after an error, in none."""
        index = slots // self.shape.shape[2], slots % self.shape.shape[2]
        keys = [key.view(torch.uint8) for key, _value in self._operands]
        self._put(keys, index, [_ERASED] * len(keys))

    def is_written(self, layer: int, slots: Sequence[int]) -> list[bool]:
        """Whether each of these slots was written after `erase`. Waits for the device."""
        rows = self._operands[layer][0].view(torch.uint8)[self._index(slots)]
        is_erased = (rows == _ERASED).flatten(1).all(1) if rows.numel() else rows.new_zeros(len(slots))
        return [not erased for erased in is_erased.tolist()]
