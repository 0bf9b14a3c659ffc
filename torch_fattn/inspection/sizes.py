"""Makes a call from sizes: operands on "meta" with the shapes of the operator."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from ..operators import BACKWARDS, DIFFERENTIABLE, DTYPES, LOGITS_OPERATORS, ROTARY
from ..operators.kv_formats import KV_FORMATS
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
CAP = 30.0  # of softcap


def operands_of(
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
) -> tuple[list[Tensor | None], dict[str, Any]]:
    """Operands on "meta" and their keywords. Defaults: kv_heads equals heads, value_dim equals head_dim, and
    q_len is 1 (prefills and maps: kv_len). `mask` is the dtype of an attn_mask for all heads. A backward has
    the `out` that `attention` keeps for it. With a prefix, `kv_len` counts the keys of the suffix."""
    function, is_backward, op = op, op in BACKWARDS, ALIKE.get(op, op).removesuffix("_backward")
    q_len = q_len or (kv_len if op.endswith(("prefill", "map")) else 1)
    kv_heads, value_dim = kv_heads or heads, value_dim or head_dim
    masks: list[Tensor | None] = []
    if mask or op == "mask_map":
        masks = [_tensor("mask", mask or torch.bool, batch, 1, q_len, kv_len)]
    if op == "mask_map":
        return masks, {}
    if op == "merge":
        rows = (parts, batch, heads, q_len)
        return [_tensor("outs", dtype, *rows, head_dim), _tensor("lses", torch.float32, *rows)], {}
    if op in LOGITS_OPERATORS:
        _logits, cap = getattr(torch.ops.fattn, op).default._schema.arguments
        needed = {} if cap.has_default_value() else {cap.name: CAP}
        return [_tensor("scores", dtype, batch, heads, q_len, kv_len)], needed

    if op == "rms_norm":
        hidden = heads * head_dim
        return [_tensor("x", dtype, batch, q_len, hidden), _tensor("weight", dtype, hidden)], {}

    operands: list[Tensor | None]
    prefix: Tensor | None = None
    keywords: dict[str, Any] = {}
    query_rows = (batch * q_len, heads) if op in PACKED else (batch, heads, q_len)
    query = _tensor("query", dtype, *query_rows, head_dim)
    if op in PACKED:
        keywords["max_seqlen_q"] = q_len
    columns = [head_dim, value_dim]
    if kv_format:
        dtype = KV_FORMATS[kv_format].dtype
        columns = [KV_FORMATS[kv_format].columns(dim) for dim in columns]
    if op == "cache_write" or op in ROTARY:
        tokens = (batch * q_len, kv_heads) if op == "cache_write" else (batch, kv_heads, q_len)
        written = [_tensor("rows", query.dtype, *tokens, dim) for dim in (head_dim, value_dim)]
        slots = _tensor("slots", torch.int64, *((batch, q_len) if op in ROTARY else (batch * q_len,)))
        tables = [_tensor("table", query.dtype, 1, q_len, head_dim)] * 2
        if op == "rotary":
            return [query, written[0], *tables], {}
    lengths = _tensor("sequence lengths", torch.int32, batch)
    starts = _tensor("starts of the sequences", torch.int32, batch + 1)
    if op.startswith(("paged", "cache", "rotary")):
        blocks = -(-(kv_len + (prefix_len if op != function else 0)) // block_size)
        pool = (batch * blocks, block_size, kv_heads)
        key, value = (
            _tensor("key cache", dtype, *pool, columns[0]),
            _tensor("value cache", dtype, *pool, columns[1]),
        )
        operands = [query, key, value, _tensor("block tables", torch.int32, batch, blocks), lengths]
        if op == "paged_prefill":
            operands.append(starts)
            keywords["is_causal"] = True
        if op == "cache_write":
            operands = [*written, key, value, slots]
        if op == "rotary_write":
            operands = [query, *written, *tables, key, value, slots]
    else:
        cache = (batch * kv_len, kv_heads) if op == "varlen_prefill" else (batch, kv_heads, kv_len)
        key, value = _tensor("key", dtype, *cache, columns[0]), _tensor("value", dtype, *cache, columns[1])
        operands = [query, key, value]
        if function == "shared_prefix_decode":
            prefix = _tensor("prefix", dtype, 1, kv_heads, prefix_len, columns[0])
            operands[1:1] = [prefix, _tensor("prefix", dtype, 1, kv_heads, prefix_len, columns[1])]
        if function == "sparse_decode":
            operands.append(_tensor("indices", torch.int32, batch, q_len, min(top_k, kv_len)))
        if op == "decode" and seq_lens is not False:
            operands.append(lengths)
        if op == "prefill" and seq_lens:
            keywords["seq_lens"] = lengths
        if op == "varlen_prefill":
            operands += [starts, starts]
            keywords["max_seqlen_k"] = kv_len
    if kv_format:
        stored = {"": key} if prefix is None else {"": key, "prefix_": prefix}
        for whose, like in stored.items():
            for part, dim in (("key", head_dim), ("value", value_dim)):
                shape, of_scales = KV_FORMATS[kv_format].scales(like.shape[:-1], dim)
                keywords[f"{whose}{part}_scales"] = torch.empty(shape, dtype=of_scales, device="meta")
            keywords[f"{whose}kv_format"] = kv_format
    if function == "shared_prefix_paged_decode":
        keywords["shared_blocks"] = prefix_len // block_size
    if function == "sdpa":
        keywords["enable_gqa"] = kv_heads != heads
    if is_backward:
        out = _tensor("out", dtype, *query_rows, value_dim)
        lse = _tensor("lse", torch.float32, *(query_rows[::-1] if op in PACKED else query_rows))
        kept = out if dtype == torch.float32 else None
        operands = [torch.empty_like(out), None, *operands[:3], kept, lse, *operands[3:]]
    return operands + masks, keywords


SIZES = tuple(name for name in inspect.signature(operands_of).parameters if name != "op")
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


def call_of(
    asker: str, op: str, operands: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The operands and options of a call that is given by operands or sizes. Errors begin with `asker`."""
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
        return operands, options
    sizes = {name: _checked(asker, op, name, options[name]) for name in SIZES if name in options}
    options = {name: value for name, value in options.items() if name not in sizes}
    signature.check((), options)
    try:
        tensors, keywords = operands_of(op, **sizes)
    except ValueError as error:
        raise ValueError(f"{asker}: {error}") from None
    return tuple(tensors), keywords | options


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
