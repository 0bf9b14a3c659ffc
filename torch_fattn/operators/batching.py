"""The differentiable operators, and their backward, under `torch.func.vmap`. The dimension of the transform
is folded into the batch, or into the heads if an operand is per head but not per sequence.

`torch.library.register_vmap` does not support tensors among keyword arguments, so these are separate kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch._functorch.autograd_function import custom_function_call_vmap_helper
from torch._functorch.pyfunctorch import VmapInterpreter, retrieve_current_functorch_interpreter

# The dimensions of batch (dense) and heads (dense and packed).
_BATCH, _HEADS = 0, 1
_WITH_HEADS = ("query", "key", "value", "grad_out", "out")
_OF_ROWS = ("lse", "grad_lse")  # [B, Hq, Lq], packed [Hq, Tq]
_LENGTHS = ("cu_seqlens_q", "cu_seqlens_k")

_library = torch.library.Library("fattn", "IMPL")

Results = tuple[tuple[Tensor, ...], tuple[int | None, ...]]


def register() -> None:
    for op in ("attention", "varlen_attention", "prefill_backward", "varlen_prefill_backward"):
        _library.impl(op, _batched(op), "FuncTorchBatched", with_keyset=True)


def _batched(op: str) -> Callable[..., Any]:
    overload = getattr(torch.ops.fattn, op).default
    names = [argument.name for argument in overload._schema.arguments]

    def batched(_keys: Any, *arguments: Any, **options: Any) -> Any:
        given = [*names[: len(arguments)], *options]

        def rule(info: Any, in_dims: tuple[int | None, ...], *values: Any) -> Results:
            dims = dict(zip(given, in_dims, strict=True))
            return _Call(op, info.batch_size, dict(zip(given, values, strict=True)), dims).results()

        return custom_function_call_vmap_helper(
            cast("VmapInterpreter", retrieve_current_functorch_interpreter()),
            rule,
            lambda *values: overload(**dict(zip(given, values, strict=True))),
            *arguments,
            *options.values(),
        )

    return batched


class _Call:
    """An operator call whose arguments have an additional dimension, of this size, at `dims`."""

    def __init__(self, op: str, size: int, given: dict[str, Any], dims: dict[str, int | None]) -> None:
        self.op, self.size, self.given, self.dims = op, size, given, dims
        self.packed = op.startswith("varlen")
        self.axis = _HEADS if self.packed or given.get("sinks") is not None else _BATCH
        for name in _LENGTHS:
            if dims.get(name) is not None:
                raise NotImplementedError(
                    f"fattn.{op}: {name} has a dimension of torch.func.vmap; pack the sequences of all its "
                    "calls into one call"
                )

    def results(self) -> Results:
        results = getattr(torch.ops.fattn, self.op)(**{n: self._folded(n) for n in self.given})
        if self.op.endswith("backward"):
            return self._gradients(*results)
        out, lse = results
        return (self._unfolded(out, self.axis), self._unfolded(lse, self._axis_of_rows)), (
            self.axis,
            self._axis_of_rows,
        )

    @property
    def _axis_of_rows(self) -> int:
        return 0 if self.packed else self.axis

    def _folded(self, name: str) -> Any:
        value = self.given[name]
        if not isinstance(value, Tensor):
            return value
        if name in _WITH_HEADS:
            return self._fold(name, self.axis)
        if name in _OF_ROWS:
            return self._fold(name, self._axis_of_rows)
        if name == "sinks":
            return self._fold(name, 0)
        if name == "alibi_slopes":
            return self._slopes()
        if name == "attn_mask":
            return self._mask()
        if name == "seq_lens":
            return self._lengths()
        # Results do not depend on the map, and the map of a folded mask would need its own fold.
        return None if name == "mask_map" else value

    def _first(self, name: str) -> Tensor:
        """The operand with the transform's dimension in front."""
        operand, dim = self.given[name], self.dims[name]
        return operand.expand(self.size, *operand.shape) if dim is None else operand.movedim(dim, 0)

    def _fold(self, name: str, axis: int) -> Tensor:
        return self._first(name).movedim(0, axis).flatten(axis, axis + 1)

    def _unfolded(self, result: Tensor, axis: int) -> Tensor:
        return result.unflatten(axis, (self.size, result.shape[axis] // self.size))

    def _slopes(self) -> Tensor:
        slopes = self._first("alibi_slopes")
        if self.axis == _HEADS:
            return slopes.movedim(0, -2).flatten(-2)
        if slopes.dim() == 2:  # [H]: the same in every sequence
            slopes = slopes[:, None].expand(-1, self._size_of_query(_BATCH), -1)
        return slopes.flatten(0, 1)

    def _lengths(self) -> Tensor:
        if self.axis == _BATCH:
            return self._fold("seq_lens", 0)
        if self.dims["seq_lens"] is not None:
            raise NotImplementedError(
                f"fattn.{self.op}: with sinks, seq_lens cannot have a dimension of torch.func.vmap; call the "
                "operator once for each of its values"
            )
        lengths: Tensor = self.given["seq_lens"]
        return lengths

    def _mask(self) -> Tensor:
        mask = self._first("attn_mask")
        mask = mask[(slice(None), *(None,) * (5 - mask.dim()))]
        if self.dims["attn_mask"] is None and mask.shape[1 + self.axis] == 1:
            return mask[0]
        sizes = list(mask.shape)
        sizes[1 + self.axis] = self._size_of_query(self.axis)
        return mask.expand(sizes).movedim(0, self.axis).flatten(self.axis, self.axis + 1)

    def _size_of_query(self, axis: int) -> int:
        query = self.given["query"]
        shape = list(query.shape)
        if (dim := self.dims["query"]) is not None:
            del shape[dim]
        return int(shape[axis])

    def _gradients(self, *results: Tensor) -> Results:
        of_query, of_key, of_value, of_sinks, of_slopes = results
        unfolded = [self._unfolded(each, self.axis) for each in (of_query, of_key, of_value)]
        dims: list[int | None] = [self.axis] * 3
        for name, gradient in (("sinks", of_sinks), ("alibi_slopes", of_slopes)):
            given = self.given.get(name)
            if given is None:
                unfolded.append(gradient)
                dims.append(None)
                continue
            is_vector = given.dim() == (1 if self.dims[name] is None else 2)
            if self.axis == _HEADS:
                axis = gradient.dim() - 1
                unfolded.append(self._unfolded(gradient, axis))
                dims.append(axis)
            else:
                gradient = self._unfolded(gradient, 0)
                unfolded.append(gradient.sum(1) if is_vector else gradient)
                dims.append(0)
        return tuple(unfolded), tuple(dims)
