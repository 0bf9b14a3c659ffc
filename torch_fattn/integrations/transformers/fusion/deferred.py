"""Tensors without memory, which are computed when something uses them.

A model rotates query and key, then its cache stores key and value, and then its attention function reads
the query. The results of a `Rotation` wait for the cache, which rotates and stores in one launch. A
`HeadNorm` waits for the rotation in the same way. An unknown step between gets an ordinary tensor, at the
price of a launch; what a result waits to read must not change in the meantime.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


class HeadNorm(NamedTuple):
    """An RMS norm of `heads`, whose axes 1 and 2 are tokens and heads in any order."""

    heads: Tensor
    weight: Tensor
    options: dict[str, Any]  # of `torch_fattn.rotary`
    compute: Any  # by functools.cache
    is_transposed: bool = False

    def result(self, _which: int) -> Tensor:
        result: Tensor = self.compute()
        return result.transpose(1, 2) if self.is_transposed else result

    def joins(self, other: HeadNorm) -> bool:
        """Whether one launch can compute both. What has been computed may have been changed in place."""
        waits = self.compute.cache_info().currsize == other.compute.cache_info().currsize == 0
        return waits and self.options == other.options and self.weight.dtype is other.weight.dtype

    def transposed(self) -> HeadNorm:
        return self._replace(heads=self.heads.transpose(1, 2), is_transposed=not self.is_transposed)


class Rotation:
    """The rotation of a layer's query (result 0) and key (1), before or after its launch."""

    __slots__ = ("is_transposed", "operands", "options", "results")

    def __init__(self, *operands: Tensor, **options: Any) -> None:
        self.operands, self.options = operands, options  # query, key, cos, sin
        # Results have the layout of the query, as those of elementwise operators.
        self.is_transposed = operands[0].stride(1) < operands[0].stride(2)
        self.results: tuple[Tensor | None, Tensor | None] = (None, None)

    def result(self, which: int) -> Tensor:
        found = self.results[which]
        if found is None:
            layout = {"token_major_out": self.is_transposed}
            self.results = both = torch.ops.fattn.rotary(*self.operands, **layout, **self.options)
            found = both[which]
        return found

    def store(self, write: Callable[..., Tensor], value: Tensor, **where: Any) -> None:
        """Also writes key and value, by `rotary_write` or a method with its first operands and options."""
        query, key, *tables = self.operands
        self.results = write(query, key, value, *tables, **where, **self.options), None


class Deferred(Tensor):
    """A result of its source."""

    source: HeadNorm | Rotation
    which: int
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def of(source: HeadNorm | Rotation, like: Tensor, which: int = 0) -> Deferred:
        """`like` has its shape, dtype and device. Strides are those that the result will have."""
        _, first, second, columns = like.shape
        inner = (columns, first * columns) if source.is_transposed else (second * columns, columns)
        strides = (first * second * columns, *inner, 1)
        made = Deferred._make_wrapper_subclass(
            Deferred, like.shape, strides=strides, dtype=like.dtype, device=like.device
        )
        made.source, made.which = source, which
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.transpose.int and {axis % 4 for axis in args[1:]} == {1, 2}:
            if isinstance(norm := args[0].source, HeadNorm):
                return Deferred.of(norm.transposed(), norm.heads.transpose(1, 2))
        args, kwargs = tree_map_only(Deferred, plain, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Deferred(shape={list(self.shape)}, dtype={self.dtype}, device={self.device})"

    # Dispatch does not reach these.

    def __deepcopy__(self, memo: Any) -> Any:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().__reduce_ex__(protocol)

    def numpy(self, *, force: bool = False) -> Any:
        return self.detach().numpy(force=force)

    def tolist(self) -> Any:
        return self.detach().tolist()


def plain(tensor: Any) -> Any:
    return tensor.source.result(tensor.which) if type(tensor) is Deferred else tensor


def waiting(key: Tensor) -> Rotation | None:
    """The rotation whose key this is, if it has not been launched."""
    if type(key) is Deferred and isinstance(key.source, Rotation) and key.which == 1:
        return key.source if key.source.results == (None, None) else None
    return None


def is_head_dim(columns: int) -> bool:
    """Whether the operators take heads of that many columns."""
    return columns % 4 == 0 and 0 < columns <= 576
