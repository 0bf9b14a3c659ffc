"""Makes a call from sizes: operands on "meta" with the shapes of the operator."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from ..operators import BACKWARDS, DIFFERENTIABLE, DTYPES, LINEAR, ROTARY
from ..operators.kv_formats import KV_FORMATS, KvFormat
from ..runtime.options import hint
from ..runtime.signatures import shown
from .planning import FUNCTIONS, signature_of

PACKED = ("paged_prefill", "varlen_prefill")
# Functions whose operands include those of an operator.
ALIKE = DIFFERENTIABLE | {
    "sdpa": "prefill",
    "shared_prefix_decode": "decode",
    "shared_prefix_paged_decode": "paged_decode",
    "sparse_decode": "decode",
}
MASKED = ("prefill", "attention", "sdpa", "prefill_backward", "mask_map")
WRITES = ("cache_write", *ROTARY)  # their key and value are of new tokens
CAP = 30.0  # of softcap
TAPS = 4


def call_of_sizes(
    op: str,
    *,
    dtype: torch.dtype = torch.float16,
    batch: int = 1,
    heads: int = 32,
    kv_heads: int | None = None,
    q_len: int | None = None,
    kv_len: int = 1024,
    head_dim: int = 128,
    value_dim: int | None = None,
    block_size: int = 16,
    kv_format: str | None = None,
    parts: int = 2,
    prefix_len: int = 1024,
    top_k: int = 2048,
    seq_lens: bool | None = None,
    mask: torch.dtype | None = None,
) -> dict[str, Any]:
    """A call by argument name, with operands on "meta". Defaults: kv_heads equals heads, value_dim equals
    head_dim, and q_len is 1 (prefills and maps, and linear attention but its step: kv_len). `mask` is the
    dtype of an attn_mask for all heads. A backward has the `out` that `attention` keeps for it. With a
    prefix, `kv_len` counts the keys of the suffix. In linear attention kv_heads are those of the keys."""
    signature, alike = signature_of(op), ALIKE.get(op, op).removesuffix("_backward")
    q_len = q_len or (kv_len if alike.endswith(("prefill", "map", "rule", "conv1d")) else 1)
    kv_heads, value_dim = kv_heads or heads, value_dim or head_dim
    blocks = -(-(kv_len + (prefix_len if op == "shared_prefix_paged_decode" else 0)) // block_size)
    rows: tuple[int, ...] = (batch * q_len, heads) if alike in PACKED else (batch, heads, q_len)
    keys: tuple[int, ...] = (batch, kv_heads, kv_len)
    if "key_cache" in signature.names:
        keys = (batch * blocks, block_size, kv_heads)
    elif alike == "varlen_prefill":
        keys = (batch * kv_len, kv_heads)
    new_keys = (batch * q_len, kv_heads) if op == "cache_write" else (batch, kv_heads, q_len)
    prefix = (1, kv_heads, prefix_len)

    out, scores, table = (dtype, *rows, value_dim), (dtype, *rows, kv_len), (dtype, 1, q_len, head_dim)
    shapes: dict[str, tuple[Any, ...]] = {
        "query": (dtype, *rows, head_dim),
        "grad_out": out,
        "out": out,
        "out_remainder": out,
        "lse": (torch.float32, *(rows[::-1] if alike in PACKED else rows)),
        "outs": (dtype, parts, *rows, head_dim),
        "lses": (torch.float32, parts, *rows),
        "scores": scores,
        "x": (dtype, batch, q_len, heads * head_dim) if op == "rms_norm" else scores,
        "weight": (dtype, heads * head_dim),
        "attn_mask": (mask or torch.bool, batch, 1, q_len, kv_len),
        "block_tables": (torch.int32, batch, blocks),
        "seq_lens": (torch.int32, batch),
        "cu_seqlens_q": (torch.int32, batch + 1),
        "cu_seqlens_k": (torch.int32, batch + 1),
        "indices": (torch.int32, batch, q_len, min(top_k, kv_len)),
        "slot_mapping": (torch.int64, *((batch * q_len,) if op == "cache_write" else (batch, q_len))),
        "cos": table,
        "sin": table,
    }
    call: dict[str, Any] = {
        "max_seqlen_q": q_len,
        "max_seqlen_k": kv_len,
        "shared_blocks": prefix_len // block_size,
        "enable_gqa": kv_heads != heads,
        "cap": CAP,
    }
    stored = KV_FORMATS[kv_format] if kv_format else KvFormat(dtype)
    for part, dim in (("key", head_dim), ("value", value_dim)):
        columns = stored.columns(dim)
        shapes[f"{part}_cache"] = (stored.dtype, *keys, columns)
        shapes[f"prefix_{part}"] = (stored.dtype, *prefix, columns)
        shapes[part] = (dtype, *new_keys, dim) if op in WRITES else shapes[f"{part}_cache"]
        for whose, cached in (("", keys), ("prefix_", prefix)) if kv_format else ():
            shape, of_scales = stored.scales(cached, dim)
            call[f"{whose}{part}_scales"] = torch.empty(shape, dtype=of_scales, device="meta")
            call[f"{whose}kv_format"] = kv_format
    if op in LINEAR:
        shapes = linear_shapes(op, dtype, (batch, q_len), (kv_heads, head_dim), (heads, value_dim))
    call = {name: value for name, value in call.items() if name in signature.names}
    if op == "paged_prefill":
        call["is_causal"] = True
    if op in BACKWARDS:
        call["grad_lse"] = None

    needed = {
        "attn_mask": mask,
        "seq_lens": seq_lens is not False if alike == "decode" else seq_lens,
        "slot_mapping": op == "rotary_write",
        "out_remainder": dtype != torch.float32,
        "weight": True,
        "state": True,
    }
    needed |= dict.fromkeys(signature.operands, True)
    return call | {
        name: _tensor(name, *shape)
        for name, shape in shapes.items()
        if needed.get(name) and name in signature.names and name not in call
    }


def linear_shapes(
    op: str, dtype: torch.dtype, tokens: tuple[int, int], key: tuple[int, int], value: tuple[int, int]
) -> dict[str, tuple[Any, ...]]:
    """`key`, `value`: heads and columns."""
    batch, heads, value_dim = tokens[0], *value
    channels = heads * value_dim + (0 if op == "causal_conv1d" else 2 * math.prod(key))
    columns = (dtype, batch, channels, TAPS - 1)
    matrices = (torch.float32, batch, heads, key[1], value_dim)
    shapes: dict[str, tuple[Any, ...]] = {
        **dict.fromkeys(("query", "key"), (dtype, *tokens, *key)),
        **dict.fromkeys(("value", "z"), (dtype, *tokens, *value)),
        **dict.fromkeys(("g", "beta", "a", "b"), (dtype, *tokens, heads)),
        **dict.fromkeys(("A_log", "dt_bias"), (torch.float32, heads)),
        **dict.fromkeys(("weight", "conv_weight"), (dtype, channels, TAPS)),
        "x": (dtype, *tokens, channels),
        **dict.fromkeys(("bias", "conv_bias"), (dtype, channels)),
        "norm_weight": (dtype, value_dim),
        **dict.fromkeys(("conv_state", "conv_state_out"), columns),
        "state": columns if op == "causal_conv1d" else matrices,
    }
    return shapes


SIZES = tuple(name for name in inspect.signature(call_of_sizes).parameters if name != "op")
_DTYPES: dict[str, Mapping[Any, Any]] = {"dtype": DTYPES, "mask": DTYPES | {"bool": torch.bool, None: None}}
_MAY_BE_NONE = ("kv_heads", "q_len", "value_dim")


def check_op(asker: str, op: str) -> None:
    if op not in FUNCTIONS:
        raise ValueError(
            f"{asker}: {shown(op)} is not an operator; use the name of a function of torch_fattn that takes "
            'tensors, such as "prefill"'
        )


def has_operands(op: str, operands: tuple[Any, ...], options: Mapping[str, Any]) -> bool:
    return bool(operands) or not options.keys().isdisjoint(signature_of(op).operands)


def call_of(asker: str, op: str, operands: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    """A call by argument name, from operands or sizes. Errors begin with `asker`."""
    signature, given = signature_of(op), has_operands(op, operands, options)
    for name in (each for each in options if each not in signature.names):
        refusal = f"{asker}: {op} has no option {name!r}"
        if name not in SIZES:
            is_operand = given or isinstance(options[name], Tensor)
            known = ("arguments", signature.names) if is_operand else ("sizes", SIZES)
            meant = hint(name, (*known[1], *signature.names))
            listed = f"the {known[0]} are {', '.join(known[1])}"
            raise TypeError(f"{refusal}{meant}; {listed}")
        if given:
            raise TypeError(f"{refusal}; leave it out, since the operands have sizes")
    if given:
        signature.check_call(operands, options)
        return dict(zip(signature.names, operands, strict=False)) | options
    sizes = {name: _checked(asker, op, name, options[name]) for name in SIZES if name in options}
    options = {name: value for name, value in options.items() if name not in sizes}
    signature.check((), options)
    try:
        return call_of_sizes(op, **sizes) | options
    except ValueError as error:
        raise ValueError(f"{asker}: {error}") from None


def _checked(asker: str, op: str, name: str, value: Any) -> Any:
    """Checks one size, and converts a dtype's name to the dtype. Numbers may have any type with
    `__index__`."""
    given = f"{asker}: {name} {shown(value)}"
    if name in _DTYPES:
        if name == "mask" and value is not None and op not in MASKED:
            raise ValueError(f"{given} is of {', '.join(MASKED)}, and {op} takes none; leave it out")
        if isinstance(value, torch.dtype):
            return value
        if value not in _DTYPES[name]:
            raise TypeError(f"{given} is not a dtype of {op}; pass for example torch.float16 or 'float16'")
        return _DTYPES[name][value]
    if name == "seq_lens":
        if not isinstance(value, bool):
            raise TypeError(f"{given} is not a bool; pass True or False, or tensors for all operands")
    elif name == "kv_format" and value is not None:
        if value not in KV_FORMATS:
            raise ValueError(f"{given} is not one of {', '.join(KV_FORMATS)}; leave it out for keys of dtype")
        if "kv_format" not in signature_of(op).names:
            raise ValueError(f"{given} is of a quantised cache, and {op} takes none; leave it out")
    elif value is not None or name not in (*_MAY_BE_NONE, "kv_format"):
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise TypeError(f"{given} is not a whole number; pass one of at least 1")
        if value < 1:
            raise ValueError(f"{given} is below 1; pass a number of at least 1")
    return value


def _tensor(name: str, dtype: torch.dtype, *shape: int) -> Tensor:
    if math.prod(shape) * dtype.itemsize > 2**63 - 1:
        raise ValueError(
            f"the {name} of {' x '.join(map(str, shape))} elements is above 2^63 bytes, the largest tensor "
            "that torch can describe; give smaller sizes"
        )
    return torch.empty(shape, dtype=dtype, device="meta")
