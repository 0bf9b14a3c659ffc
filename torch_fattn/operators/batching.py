"""The differentiable operators, and their backward, under `torch.func.vmap`. Dense calls without masks,
sinks or slopes fold the dimension of the transform into the batch; others run once for each member.

`torch.library.register_vmap` does not support tensors among keyword arguments, so these are separate kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch._functorch.autograd_function import custom_function_call_vmap_helper
from torch._functorch.pyfunctorch import VmapInterpreter, retrieve_current_functorch_interpreter

from . import BACKWARDS, DIFFERENTIABLE

_library = torch.library.Library("fattn", "IMPL")

Dims = dict[str, int | None]  # of the transform, by argument
Results = tuple[tuple[Tensor, ...], tuple[int, ...]]


def register() -> None:
    for name in (*DIFFERENTIABLE, *BACKWARDS, *(f"{op}.with_remainder" for op in DIFFERENTIABLE)):
        op, _, overload = name.partition(".")
        _library.impl(name, _batched(op, overload or "default"), "FuncTorchBatched", with_keyset=True)


def _batched(op: str, name: str) -> Callable[..., Any]:
    overload = getattr(getattr(torch.ops.fattn, op), name)
    names = [argument.name for argument in overload._schema.arguments]

    def call_batched(_keys: Any, *arguments: Any, **options: Any) -> Any:
        given = [*names[: len(arguments)], *options]

        def rule(info: Any, in_dims: tuple[int | None, ...], *values: Any) -> Results:
            dims = dict(zip(given, in_dims, strict=True))
            call = dict(zip(given, values, strict=True))
            apart = ("attn_mask", "block_mask", "sinks", "alibi_slopes")
            is_plain = not any(call.get(name) is not None for name in apart)
            batched = _folded if is_plain and not op.startswith("varlen") else _looped
            results = batched(overload, info.batch_size, call, dims)
            return results, (0,) * len(results)

        return custom_function_call_vmap_helper(
            cast("VmapInterpreter", retrieve_current_functorch_interpreter()),
            rule,
            lambda *values: overload(**dict(zip(given, values, strict=True))),
            *arguments,
            *options.values(),
        )

    return call_batched


def _folded(op: Callable[..., Any], size: int, call: dict[str, Any], dims: Dims) -> tuple[Tensor, ...]:
    folded = dict(call)
    for name, operand in call.items():
        if isinstance(operand, Tensor):
            dim = dims[name]
            first = operand.expand(size, *operand.shape) if dim is None else operand.movedim(dim, 0)
            folded[name] = None if name == "mask_map" else first.flatten(0, 1)
    return tuple(each.unflatten(0, (size, each.shape[0] // size)) for each in op(**folded))


def _looped(op: Callable[..., Any], size: int, call: dict[str, Any], dims: Dims) -> tuple[Tensor, ...]:
    def member(name: str, i: int) -> Any:
        value, dim = call[name], dims[name]  # a list of numbers has a list of dims
        return value.select(dim, i) if isinstance(value, Tensor) and dim is not None else value

    results = [op(**{name: member(name, i) for name in call}) for i in range(size)]
    return tuple(torch.stack(each) for each in zip(*results, strict=True))
