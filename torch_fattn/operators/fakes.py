"""The operators on tensors without data (meta tensors, torch.compile, export): the same errors and result
shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from ..runtime.tensor_checks import check_device
from . import ATTENTION, BACKWARDS, DIFFERENTIABLE, LOGITS_OPERATORS
from .kv_formats import head_dim

_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


def register() -> None:
    results: dict[str, Callable[..., Any]] = {
        **dict.fromkeys(ATTENTION, _attention_result),
        **dict.fromkeys(BACKWARDS, _gradients),
        **dict.fromkeys(LOGITS_OPERATORS, lambda logits, *_, **__: logits.new_empty(logits.shape)),
        "merge": lambda outs, lses: (outs.new_empty(outs.shape[1:]), lses.new_empty(lses.shape[1:])),
        "mask_map": _map_of,
        "cache_write": lambda *_, **__: None,
        "rms_norm": _normed,
        "gated_delta_rule": _of_value_heads,
        "gated_delta_step": _of_value_heads,
        "causal_conv1d": lambda x, *_, **__: x.new_empty(x.shape),
        "rotary": lambda query, key, *_, **options: (_rotated(query, **options), _rotated(key, **options)),
        "rotary_write": lambda query, *_, **options: _rotated(query, **options),
    }
    for op, result_of in results.items():
        torch.library.register_fake(f"fattn::{op}", _fake(op, result_of))
    for op, computed in DIFFERENTIABLE.items():
        torch.library.register_fake(f"fattn::{op}", _fake(computed, results[computed]))
        torch.library.register_fake(f"fattn::{op}.with_remainder", _fake(computed, _with_remainder))
    for op in ATTENTION:
        torch.library.register_fake(f"fattn::{op}.part", _fake(op, _part))
    torch.library.register_fake("fattn::merge.parts", _merged_parts)
    for op in ("_refuse_backward", "_refuse_second_derivative"):
        torch.library.register_fake(f"fattn::{op}", lambda grad, op: torch.empty_like(grad))


def _fake(op: str, result_of: Callable[..., Any]) -> Callable[..., Any]:
    def fake(*arguments: Any, **options: Any) -> Any:
        _check(op, arguments, options)
        return result_of(*arguments, **options)

    return fake


def _with_remainder(*arguments: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    out, lse = _attention_result(*arguments, **options)
    return out, lse, torch.empty_like(out)


def _part(*arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """The result of the overload `part`. Packed rows are in the order of lse."""
    out, lse = _attention_result(*arguments, **options)
    is_packed = out.dim() == 3
    part = out.new_empty(out.transpose(0, 1).shape if is_packed else out.shape, dtype=torch.float32)
    return part.transpose(0, 1) if is_packed else part, lse.new_empty(*lse.shape, 4)


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
    """out and lse of rows `[B, Hq, Lq, D]` or packed rows `[T, Hq, D]`, whose lse is `[Hq, T]`."""
    rows = query.shape[:-1]
    out = _like(query, head_dim(value.shape[-1], kv_format), token_major_out)
    return out, query.new_empty(rows if len(rows) == 3 else rows[::-1], dtype=torch.float32)


def _like(rows: Tensor, dim: int, token_major_out: bool = False) -> Tensor:
    if token_major_out:
        return _like(rows.transpose(1, 2), dim).transpose(1, 2)
    return rows.new_empty(*rows.shape[:-1], dim)


def _gradients(*arguments: Any, **options: Any) -> tuple[Tensor, ...]:
    query = arguments[2]
    parameters = (options.get("sinks"), options.get("alibi_slopes"))
    return tuple(
        query.new_empty(0, dtype=torch.float32) if each is None else each.new_empty(each.shape)
        for each in (*arguments[2:5], *parameters)
    )


def _normed(x: Tensor, *_: Any, float32_out: bool = False, **__: Any) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.float32 if float32_out else x.dtype)


def _of_value_heads(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
    return query.new_empty((value.flatten(2, 3) if value.dim() == 5 else value).shape)


def _rotated(rows: Tensor, token_major_out: bool = False, **_: Any) -> Tensor:
    return _like(rows, rows.shape[-1], token_major_out)


def _map_of(attn_mask: Tensor) -> Tensor:
    *leading, rows, keys = (1, 1, 1, 1, *attn_mask.shape)[-4:]
    return attn_mask.new_empty(*leading, (rows + 15) // 16, (keys + 31) // 32, dtype=torch.uint8)


def _check(op: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Raises the operator's errors by planning the call with meta tensors of these shapes. Only devices are
    compared here. Sizes that are still unknown are checked when the operator runs."""
    schema = getattr(torch.ops.fattn, op).default._schema
    named = dict(zip((argument.name for argument in schema.arguments), arguments, strict=False)) | options
    if all(number.node.has_hint() for value in named.values() for number in _symbols_of(value)):
        with unset_fake_temporarily():
            getattr(torch.ops.fattn, f"_plan_{op}")(**{name: _concrete(v) for name, v in named.items()})
    tensors = {name: value for name, value in named.items() if isinstance(value, Tensor)}
    first = "query" if "query" in tensors else next(iter(tensors))
    for name, tensor in tensors.items():
        check_device(f"fattn.{op}", name, tensor, tensors[first], first)


def _symbols_of(value: Any) -> Iterator[Any]:
    numbers = (*value.shape, *value.stride()) if isinstance(value, Tensor) else (value,)
    return (number for number in numbers if isinstance(number, _SYMBOLS))


def _concrete(value: Any) -> Any:
    """The argument without symbolic sizes; a tensor becomes a meta tensor."""
    if isinstance(value, Tensor):
        sizes, strides = ([_concrete(n) for n in numbers] for numbers in (value.shape, value.stride()))
        return torch.empty_strided(sizes, strides, dtype=value.dtype, device="meta")
    return value.node.hint if isinstance(value, _SYMBOLS) else value
