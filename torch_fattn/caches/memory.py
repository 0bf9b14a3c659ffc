"""Memory of the layers, and index tensors made on the device, for both cache classes. A copy from the host
waits for an "mps" device, so index tensors are made there, as runs of consecutive numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..operators import DTYPES
from ..operators.cache_write import cache_write
from ..operators.head_padding import HEAD_STEP, MAX_HEAD_DIM
from ..operators.kv_formats import KV_FORMATS, check_format, formats_where


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

    def check(self, name: str) -> None:
        check_sizes(name, 1, num_layers=self.num_layers, head_dim=self.head_dim, value_dim=self.value_dim)
        for what, dim in (("head_dim", self.head_dim), ("value_dim", self.value_dim)):
            _check_dim(name, what, dim)
            check_bytes(name, 4, self.num_layers, *self.shape, dim)
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

    def memory(self, dim: int) -> tuple[Tensor, Tensor | None]:
        """Shapes and dtypes of keys or values of that size, and of their scales."""
        if self.kv_format == "auto":
            return torch.empty(*self.shape, dim, dtype=self.dtype, device=self.device), None
        kind = KV_FORMATS[self.kv_format]
        shape, dtype = kind.scales(self.shape, dim)
        return (
            torch.empty(*self.shape, kind.columns(dim), dtype=kind.dtype, device=self.device),
            torch.empty(shape, dtype=dtype, device=self.device),
        )


class Layers:
    """The keys and values of every layer, with slots before heads as `cache_write` and `paged_decode` take
    them. In memory, the slots of a head are contiguous."""

    def __init__(self, name: str, shape: CacheShape) -> None:
        shape.check(name)
        self._operands: list[tuple[Tensor, Tensor]] = []
        self._options: list[dict[str, Any]] = []
        self._shape = shape
        for _ in range(shape.num_layers):
            with torch.inference_mode(False):  # the cache must outlive inference mode
                key, key_scales = shape.memory(shape.head_dim)
                value, value_scales = shape.memory(shape.value_dim)
            self._operands.append((key.transpose(1, 2), value.transpose(1, 2)))
            options: dict[str, Any] = {}
            if key_scales is not None and value_scales is not None:
                options["key_scales"] = key_scales.transpose(1, 2)
                options["value_scales"] = value_scales.transpose(1, 2)
                options["kv_format"] = shape.kv_format
            self._options.append(options)
            if len(self._options) == 1 and 0 not in shape.shape:
                self._write_nothing(shape)

    def _write_nothing(self, shape: CacheShape) -> None:
        """Refuses what `cache_write` would refuse, before all memory is allocated."""
        key, value = (
            torch.empty(0, shape.shape[1], dim, dtype=shape.dtype, device=shape.device)
            for dim in (shape.head_dim, shape.value_dim)
        )
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

    def tensors(self) -> Iterator[Tensor]:
        for operands, options in zip(self._operands, self._options, strict=True):
            yield from operands
            yield from (option for option in options.values() if isinstance(option, Tensor))

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())

    @property
    def words(self) -> str:
        shape = self._shape
        return (
            f"{shape.num_layers} layers of {shape.shape[1]} key-value heads, {shape.head_dim} and "
            f"{shape.value_dim} columns, {shape.stored} on {shape.device}"
        )

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies the rows of some slots to others, in every layer. After an error, all are as they were."""
        device, slots = self._operands[0][0].device, self._operands[0][0].shape[1]
        source, target = (on_device(numbers, device) for numbers in (sources, targets))
        source_index, target_index = ((each // slots, each % slots) for each in (source, target))
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

    def check_new(self, method: str, key: Tensor, value: Tensor, tokens: int) -> None:
        """Raises unless keys and values are those of `tokens` new tokens. The operator's own message would
        name tensors that the caller of a cache never sees."""
        heads = self._shape.shape[1]
        for what, rows, dim in (("key", key, self._shape.head_dim), ("value", value, self._shape.value_dim)):
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
        device = self._operands[0][0].device
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


def fill(out: Tensor, numbers: Sequence[int]) -> None:
    """Writes the numbers into a tensor on the device."""
    start = 0
    for end in range(1, len(numbers) + 1):
        if end == len(numbers) or numbers[end] != numbers[end - 1] + 1:
            run = out[start:end]
            torch.arange(numbers[start], numbers[end - 1] + 1, out=run, device=run.device)
            start = end


def on_device(numbers: Sequence[int], device: torch.device) -> Tensor:
    """The numbers as int64 on the device."""
    out = torch.empty(len(numbers), dtype=torch.int64, device=device)
    fill(out, numbers)
    return out


@dataclass(frozen=True)
class NewTokens:
    """Packed tokens of several sequences. All fields but the counts are on the device."""

    counts: Tensor | int  # int64 [batch]; an int is for every sequence
    sequence: Tensor  # the index of each token's sequence in the batch
    offset: Tensor  # its index among the new tokens of its sequence
    starts: Tensor  # start of each sequence's tokens, and the end: int32 [batch + 1]


def new_tokens(counts: Sequence[int], device: torch.device) -> NewTokens:
    token = torch.arange(sum(counts), device=device)
    if len(set(counts)) <= 1:
        each = counts[0] if counts else 0
        starts = torch.arange(len(counts) + 1, dtype=torch.int32, device=device) * each
        return NewTokens(each, token // max(each, 1), token % max(each, 1), starts)
    numbers = on_device(counts, device)
    batch = torch.arange(len(counts), device=device)
    sequence = torch.repeat_interleave(batch, numbers, output_size=len(token))
    starts = pad(numbers.cumsum(0), (1, 0))
    return NewTokens(numbers, sequence, token - starts[sequence], starts.int())


def counts_of(name: str, tokens: int | Sequence[int], batch: int) -> list[int]:
    """A number of new tokens for each sequence."""
    counts = [int(tokens)] * batch if isinstance(tokens, (int, Integral)) else [int(n) for n in tokens]
    if len(counts) != batch:
        raise ValueError(
            f"{name}: {len(counts)} numbers of new tokens were given for {batch} sequences; give one for each"
        )
    if any(count < 0 for count in counts):
        raise ValueError(f"{name}: {min(counts)} is not a number of new tokens; give 0 or more")
    return counts
