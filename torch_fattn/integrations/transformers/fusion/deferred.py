"""Tensors without memory, which are computed when something uses them.

A model rotates query and key, then its cache stores key and value, and then its attention function reads
the query. `Rotated` tensors wait for the cache, which rotates and stores in one launch. `HeadNorm` tensors
wait for the rotation in the same way. An unknown step between gets an ordinary tensor, at the price of a
launch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


class Deferred(Tensor):
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def plain(self) -> Tensor:
        """The tensor, computed once."""
        raise NotImplementedError

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        first = args[0] if args else None
        if func is torch.ops.aten.transpose.int and type(first) is HeadNorm and first.result is None:
            if {axis % 4 for axis in args[1:]} == {1, 2}:
                return first.transposed()
        args, kwargs = tree_map_only(Deferred, lambda each: each.plain(), (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(shape={list(self.shape)}, dtype={self.dtype}, device={self.device})"


class HeadNorm(Deferred):
    """The RMS norm of `[B, L, H, D]` or, if `is_transposed`, a transposed view of it. `options` are those of
    `torch_fattn.rotary`."""

    rows: Tensor
    weight: Tensor
    options: dict[str, Any]
    compute: Callable[[Tensor], Tensor]
    is_transposed: bool
    result: Tensor | None

    @staticmethod
    def of(
        rows: Tensor,
        weight: Tensor,
        options: dict[str, Any],
        compute: Callable[[Tensor], Tensor],
        is_transposed: bool = False,
    ) -> HeadNorm:
        like = rows.transpose(1, 2) if is_transposed else rows
        made = HeadNorm._make_wrapper_subclass(HeadNorm, like.shape, dtype=like.dtype, device=like.device)
        made.rows, made.weight, made.options, made.compute = rows, weight, options, compute
        made.is_transposed, made.result = is_transposed, None
        return made

    def transposed(self) -> HeadNorm:
        return HeadNorm.of(self.rows, self.weight, self.options, self.compute, not self.is_transposed)

    def joins(self, other: HeadNorm) -> bool:
        """Whether one launch can compute both."""
        waits = self.result is None and other.result is None
        return waits and self.options == other.options and self.weight.dtype is other.weight.dtype

    def before(self) -> Tensor:
        """What is normalised, in the shape of the result."""
        return self.rows.transpose(1, 2) if self.is_transposed else self.rows

    def plain(self) -> Tensor:
        if self.result is None:
            result = self.compute(self.rows)
            self.result = result.transpose(1, 2) if self.is_transposed else result
        return self.result


class Rotation:
    """The rotation of a layer's query and key, before or after its launch."""

    __slots__ = ("operands", "options", "results")

    def __init__(self, *operands: Tensor, **options: Any) -> None:
        self.operands, self.options = operands, options  # query, key, cos, sin
        self.results: tuple[Tensor | None, Tensor | None] = (None, None)

    def both(self) -> tuple[Rotated, Rotated]:
        return Rotated.of(self, 0), Rotated.of(self, 1)

    def result(self, which: int) -> Tensor:
        if (found := self.results[which]) is None:
            self.results = both = torch.ops.fattn.rotary(*self.operands, **self.options)
            found = both[which]
        return found

    def store(self, value: Tensor, key_cache: Tensor, value_cache: Tensor, **where: Any) -> None:
        """Also writes the key and `value` `[B, H, L, D]` to caches `[B, H, capacity, D]`."""
        query, key, cos, sin = self.operands
        caches = key_cache.transpose(1, 2), value_cache.transpose(1, 2)
        out = torch.ops.fattn.rotary_write(query, key, value, cos, sin, *caches, **where, **self.options)
        self.results = out, None


class Rotated(Deferred):
    """The query (0) or key (1) of a rotation."""

    rotation: Rotation
    which: int

    @staticmethod
    def of(rotation: Rotation, which: int) -> Rotated:
        like = rotation.operands[which]
        made = Rotated._make_wrapper_subclass(Rotated, like.shape, dtype=like.dtype, device=like.device)
        made.rotation, made.which = rotation, which
        return made

    def plain(self) -> Tensor:
        return self.rotation.result(self.which)


def plain(tensor: Any) -> Any:
    return tensor.plain() if isinstance(tensor, Deferred) else tensor


def pending(key: Any) -> Rotation | None:
    """The rotation whose key this is, if it has not been launched."""
    waits = type(key) is Rotated and key.which == 1 and key.rotation.results == (None, None)
    return key.rotation if waits else None
