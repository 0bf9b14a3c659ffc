"""The operators on tensors without data (meta tensors, torch.compile, export): the same errors, and results
of the same shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from . import ATTENTION, BACKWARDS, DIFFERENTIABLE, LOGITS_OPERATORS, OPERATORS
from .kv_formats import head_dim

_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


def register() -> None:
    for op in OPERATORS:
        torch.library.register_fake(f"fattn::{op}", _fake(op))
    for op, computed in DIFFERENTIABLE.items():
        torch.library.register_fake(f"fattn::{op}", _fake(computed))
    for op in LOGITS_OPERATORS:
        torch.library.register_fake(f"fattn::{op}", _logits_fake(op))
    for op in BACKWARDS:
        torch.library.register_fake(f"fattn::{op}", _backward_fake(op))
    for op in ATTENTION:
        torch.library.register_fake(f"fattn::{op}.part", _part_fake(op))
    torch.library.register_fake("fattn::merge.parts", _merged_parts)
    torch.library.register_fake("fattn::mask_map", _mask_map)
    torch.library.register_fake("fattn::cache_write", _cache_write)
    for op in ("_refuse_backward", "_refuse_second_derivative"):
        torch.library.register_fake(f"fattn::{op}", lambda grad, op: torch.empty_like(grad))


def _fake(op: str) -> Callable[..., tuple[Tensor, Tensor]]:
    results: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
        "merge": _merge_result,
        "paged_prefill": _packed_result,
        "varlen_prefill": _packed_result,
    }
    result_of = results.get(op, _attention_result)

    def fake(*arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
        _check(op, arguments, options)
        return result_of(*arguments, **options)

    return fake


def _part_fake(op: str) -> Callable[..., tuple[Tensor, Tensor]]:
    fake = _fake(op)

    def part_fake(*arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
        out, lse = fake(*arguments, **options)
        if out.dim() == 3:  # packed rows, in the order of lse
            part = out.new_empty(out.transpose(0, 1).shape, dtype=torch.float32).transpose(0, 1)
        else:
            part = out.new_empty(out.shape, dtype=torch.float32)
        return part, lse.new_empty(*lse.shape, 4)

    return part_fake


def _backward_fake(op: str) -> Callable[..., tuple[Tensor, ...]]:
    def fake(*arguments: Any, **options: Any) -> tuple[Tensor, ...]:
        _check(op, arguments, options)
        query = arguments[2]
        parameters = (options.get("sinks"), options.get("alibi_slopes"))
        return tuple(
            query.new_empty(0, dtype=torch.float32) if each is None else each.new_empty(each.shape)
            for each in (*arguments[2:5], *parameters)
        )

    return fake


def _merged_parts(outs: Tensor, sums: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return outs.new_empty(outs.shape[1:], dtype=dtype), sums.new_empty(sums.shape[1:-1])


def _attention_result(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *_: Any,
    kv_format: str | None = None,
    token_major_out: bool = False,
    **__: Any,
) -> tuple[Tensor, Tensor]:
    """The value head dim: the last dimension of `[B, Hkv, Lk, Dv]` or a pool `[num_blocks, block_size, Hkv,
    Dv]`, twice that for int4, which has two elements per byte."""
    batch, heads, q_len, _head_dim = query.shape
    value_dim = head_dim(value.shape[-1], kv_format)
    if token_major_out:
        out = query.new_empty(batch, q_len, heads, value_dim).transpose(1, 2)
    else:
        out = query.new_empty(batch, heads, q_len, value_dim)
    return out, query.new_empty(batch, heads, q_len, dtype=torch.float32)


def _packed_result(
    query: Tensor, key: Tensor, value: Tensor, *_: Any, kv_format: str | None = None, **__: Any
) -> tuple[Tensor, Tensor]:
    rows, heads, _head_dim = query.shape
    return (
        query.new_empty(rows, heads, head_dim(value.shape[-1], kv_format)),
        query.new_empty(heads, rows, dtype=torch.float32),
    )


def _merge_result(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    return outs.new_empty(outs.shape[1:]), lses.new_empty(lses.shape[1:])


def _logits_fake(op: str) -> Callable[..., Tensor]:
    def fake(logits: Tensor, *arguments: Any, **options: Any) -> Tensor:
        _check(op, (logits, *arguments), options)
        return logits.new_empty(logits.shape)

    return fake


def _mask_map(attn_mask: Tensor) -> Tensor:
    _check("mask_map", (attn_mask,), {})
    *leading, rows, keys = (1, 1, 1, 1, *attn_mask.shape)[-4:]
    return attn_mask.new_empty(*leading, (rows + 15) // 16, (keys + 31) // 32, dtype=torch.uint8)


def _cache_write(*arguments: Any, **options: Any) -> None:
    _check("cache_write", arguments, options)


def _check(op: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Raises the errors of the operator, by planning the call with meta tensors of these shapes. Only devices
    are compared here. A size that is unknown now is checked when the operator runs."""
    schema = getattr(torch.ops.fattn, op).default._schema
    named = dict(zip((argument.name for argument in schema.arguments), arguments, strict=False)) | options
    if all(number.node.has_hint() for value in named.values() for number in _symbols_of(value)):
        with unset_fake_temporarily():
            getattr(torch.ops.fattn, f"_plan_{op}")(**{name: _concrete(v) for name, v in named.items()})
    _check_devices(op, {name: value for name, value in named.items() if isinstance(value, Tensor)})


def _check_devices(op: str, tensors: dict[str, Tensor]) -> None:
    first = "query" if "query" in tensors else next(iter(tensors))
    for name in tensors:
        if tensors[name].device != tensors[first].device:
            # Advise to move tensors from the CPU to the GPU.
            is_far = tensors[first].device.type == "cpu" and tensors[name].device.type != "meta"
            moved, other = (first, name) if is_far else (name, first)
            raise ValueError(
                f"fattn.{op}: {name} is on {tensors[name].device} and {first} on {tensors[first].device}; "
                f"move {moved} with .to({other}.device)"
            )


def _symbols_of(value: Any) -> Iterator[Any]:
    numbers = (*value.shape, *value.stride()) if isinstance(value, Tensor) else (value,)
    return (number for number in numbers if isinstance(number, _SYMBOLS))


def _concrete(value: Any) -> Any:
    """The argument without symbolic sizes; a tensor becomes a meta tensor."""
    if isinstance(value, Tensor):
        sizes, strides = ([_concrete(n) for n in numbers] for numbers in (value.shape, value.stride()))
        return torch.empty_strided(sizes, strides, dtype=value.dtype, device="meta")
    return value.node.hint if isinstance(value, _SYMBOLS) else value
