"""Memory of the layers, for both cache classes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..operators import DTYPES
from ..operators.cache_write import cache_write
from ..operators.head_padding import HEAD_STEP, MAX_HEAD_DIM
from ..operators.kv_formats import KV_FORMATS, check_format, formats_where
from .indices import on_device


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


def _check_dim(name: str, what: str, dim: int) -> None:
    padded = dim + -dim % HEAD_STEP
    if dim % HEAD_STEP and padded <= MAX_HEAD_DIM:
        more = f"decode with scale={dim} ** -0.5" if what == "head_dim" else f"cut results to {dim} columns"
        raise ValueError(
            f"{name}: {what} {dim} is not a positive multiple of {HEAD_STEP}; give {padded}, pad with zeros "
            f"and {more}"
        )
    if dim > MAX_HEAD_DIM:
        raise NotImplementedError(
            f"{name}: {what} {dim} is above {MAX_HEAD_DIM}, the largest with a kernel so far; keep keys "
            "and values in tensors of your own for F.scaled_dot_product_attention"
        )


def _check_device(name: str, device: torch.device | str) -> None:
    try:
        torch.empty(1, device=device)
    except (AssertionError, NotImplementedError, RuntimeError, ValueError):
        raise ValueError(
            f'{name}: device {str(device)!r} is not available here; use "mps" or "cpu"'
        ) from None


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
        for what, dim in (("head_dim", self.head_dim), ("value_dim", self.value_dim)):
            _check_dim(name, what, dim)
            check_bytes(name, 4, self.num_layers, *self.shape, dim)
        if self.is_latent and self.value_dim > self.head_dim:
            raise ValueError(
                f"{name}: value_dim {self.value_dim} is above head_dim {self.head_dim}, and the values of a "
                f"latent cache are the first columns of its keys; give at most {self.head_dim}"
            )
        _check_device(name, self.device)
        check_format(name, self.kv_format, "auto")
        if self.dtype not in DTYPES.values():
            raise TypeError(
                f"{name}: dtype {self.dtype} is not torch.float32, torch.float16 or torch.bfloat16; give one "
                "of them, and a kv_format to store keys and values in fewer bits"
            )
        group = 0 if self.kv_format == "auto" else KV_FORMATS[self.kv_format].group
        if group and (self.head_dim % group or self.value_dim % group):
            raise ValueError(
                f"{name}: heads of {self.head_dim} and {self.value_dim} are not multiples of {group}, the "
                f"group of {self.kv_format}; use {formats_where(lambda kind: not kind.group)}"
            )

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

    def view_of_values(self, key: Tensor) -> Tensor:
        """The columns of stored keys that are the values of a latent cache."""
        packed = 1 if self.kv_format == "auto" else KV_FORMATS[self.kv_format].packed
        return key[..., : self.value_dim // packed]

    def view_of_scales(self, scales: Tensor) -> Tensor:
        group = KV_FORMATS[self.kv_format].group
        return scales[..., : self.value_dim // group, :] if group else scales

    def memory(self, dim: int) -> tuple[Tensor, Tensor | None]:
        """Allocates the keys or values of a layer, and their scales."""
        if self.kv_format == "auto":
            return torch.empty(*self.shape, dim, dtype=self.dtype, device=self.device), None
        kind = KV_FORMATS[self.kv_format]
        shape, dtype = kind.scales(self.shape, dim)
        return (
            torch.empty(*self.shape, kind.columns(dim), dtype=kind.dtype, device=self.device),
            torch.empty(shape, dtype=dtype, device=self.device),
        )


_ERASED = 0xFF  # bytes of an unwritten key: a NaN, or codes that `cache_write` never stores


class Layers:
    """The keys and values of every layer, as views with slots before heads. In memory, the slots of a head
    are contiguous."""

    def __init__(self, name: str, shape: CacheShape) -> None:
        shape.check(name)
        self._operands: list[tuple[Tensor, Tensor]] = []
        self._options: list[dict[str, Any]] = []
        self._shape = shape
        self._memory: list[Tensor] = []
        self.every = frozenset(range(shape.num_layers))
        self.written: set[int] = set()  # layers that have been written
        for _ in range(shape.num_layers):
            with torch.inference_mode(False):  # the cache outlives inference mode
                sides = [shape.memory(shape.head_dim)]
                sides += [] if shape.is_latent else [shape.memory(shape.value_dim)]
            self._add(sides)
            if len(self._options) == 1 and 0 not in shape.shape:
                self._write_nothing()

    def _add(self, sides: Sequence[tuple[Tensor, Tensor | None]]) -> None:
        """Adds a layer: keys with scales, and values unless the cache is latent."""
        turned = [tuple(None if each is None else each.transpose(1, 2) for each in side) for side in sides]
        self._memory += [each for side in turned for each in side if each is not None]
        (key, key_scales), (value, value_scales) = turned[0], turned[-1]
        assert key is not None and value is not None
        if self._shape.is_latent:
            value = self._shape.view_of_values(key)
            value_scales = None if key_scales is None else self._shape.view_of_scales(key_scales)
        self._operands.append((key, value))
        options: dict[str, Any] = {}
        if key_scales is not None:
            options = {"key_scales": key_scales, "value_scales": value_scales}
            options["kv_format"] = self._shape.kv_format
        self._options.append(options)

    def _write_nothing(self) -> None:
        """Raises the errors of `cache_write` before the other layers are allocated."""
        shape = self._shape
        key = torch.empty(0, shape.shape[1], shape.head_dim, dtype=shape.dtype, device=shape.device)
        separate = None if shape.is_latent else key.new_empty(0, shape.shape[1], shape.value_dim)
        key, value = self.new_rows("", key, separate, 0)
        self.write(0, torch.empty(0, dtype=torch.int64, device=shape.device), key, value)

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
    def shape(self) -> CacheShape:
        return self._shape

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())

    def read(self, slots: Sequence[int]) -> list[Tensor]:
        """Copies the rows of these slots to host memory. Waits for the device."""
        index = self._index(slots)
        return [memory[index].cpu() for memory in self.tensors()]

    def restore(self, slots: Sequence[int], rows: Sequence[Tensor]) -> None:
        """Writes what `read` returned to these slots."""
        self._put(self._index(slots), [each.to(self.device) for each in rows])

    def _index(self, slots: Sequence[int]) -> tuple[Tensor, Tensor]:
        numbers = on_device(slots, self.device)
        return numbers // self._shape.shape[2], numbers % self._shape.shape[2]

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies rows from slots to slots, in every layer. An error leaves all unchanged."""
        source_index, target_index = self._index(sources), self._index(targets)
        new = [memory[source_index] for memory in self.tensors()]
        old = [memory[target_index] for memory in self.tensors()]
        try:
            self._put(target_index, new)
        except BaseException:
            self._put(target_index, old)
            raise

    def _put(self, index: tuple[Tensor, Tensor], rows: Sequence[Tensor]) -> None:
        for memory, own in zip(self.tensors(), rows, strict=True):
            memory[index] = own

    def new_rows(self, method: str, key: Tensor, value: Tensor | None, tokens: int) -> tuple[Tensor, Tensor]:
        """Checks the keys and values of `tokens` new tokens. The operator's own error would name tensors that
        the caller never sees."""
        if self._shape.is_latent and value is not None:
            raise ValueError(f"{method}: value is given, and a latent cache takes it from key; leave it out")
        if value is None and not self._shape.is_latent:
            raise TypeError(f"{method}: value is None; pass a tensor, or make the cache with latent=True")
        heads = self._shape.shape[1]
        for what, rows, dim in (("key", key, self._shape.head_dim), ("value", value, self._shape.value_dim)):
            if rows is None:
                continue
            self.check_kind(method, what, rows)
            if rows.dim() != 3 or rows.shape[1:] != (heads, dim):
                raise ValueError(
                    f"{method}: {what} has shape {list(rows.shape)} and the cache {heads} key-value heads of "
                    f"{dim}; pass [{tokens}, {heads}, {dim}]"
                )
            if rows.shape[0] != tokens:
                raise ValueError(
                    f"{method}: {what} has {rows.shape[0]} tokens and the step {tokens}; pass the step's "
                    f"{tokens} tokens"
                )
        return key, key[..., : self._shape.value_dim] if value is None else value

    def check_query(self, method: str, query: Tensor) -> None:
        self.check_kind(method, "query", query)
        if query.shape[-1] != self._shape.head_dim:
            raise ValueError(
                f"{method}: query has head_dim {query.shape[-1]} and the cache {self._shape.head_dim}; pass "
                f"rows of {self._shape.head_dim}"
            )
        heads, kv_heads = query.shape[1], self._shape.shape[1]
        if heads % kv_heads if kv_heads else heads:
            raise ValueError(
                f"{method}: query has {heads} heads, which cannot share the cache's {kv_heads} key-value "
                f"heads; pass a multiple of {kv_heads} in dimension 1"
            )

    def check_kind(self, method: str, what: str, rows: Tensor) -> None:
        """Checks device and dtype. A quantised cache takes rows of every supported dtype."""
        device = self.device
        if rows.device != device and rows.is_meta:
            raise ValueError(f"{method}: {what} is on meta, which has no data; pass a tensor with data")
        if rows.device != device:
            raise ValueError(
                f"{method}: {what} is on {rows.device} and the cache on {device}; move it with "
                f'.to("{device}"), the cache\'s device'
            )
        dtype = self._shape.dtype
        if rows.dtype != dtype and (self._shape.kv_format == "auto" or rows.dtype not in DTYPES.values()):
            raise TypeError(
                f"{method}: {what} is {rows.dtype} and the cache {dtype}; convert it with .to({dtype}), the "
                "cache's dtype"
            )

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        cache_write(key, value, *self.operands(layer), slots, **self.options(layer))
        if slots.shape[0] > 0:
            self.written.add(layer)

    def erase(self, slots: Tensor) -> None:
        """Marks the keys of these slots as unwritten in every layer; after an error, in none."""
        index = slots // self._shape.shape[2], slots % self._shape.shape[2]
        keys = [key.view(torch.uint8) for key, _value in self._operands]
        old = [key[index] for key in keys]
        try:
            for key in keys:
                key[index] = _ERASED
        except BaseException:
            for key, rows in zip(keys, old, strict=True):
                key[index] = rows
            raise

    def is_written(self, layer: int, slots: Sequence[int]) -> list[bool]:
        """Whether each of these slots was written after `erase`. Waits for the device."""
        rows = self._operands[layer][0].view(torch.uint8)[self._index(slots)]
        is_erased = (rows == _ERASED).flatten(1).all(1) if rows.numel() else rows.new_zeros(len(slots))
        return [not erased for erased in is_erased.tolist()]
