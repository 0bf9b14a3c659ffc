"""A call of every operator, made from its schema: all tensors that it takes, at any sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.helpers.kv_formats import QUANTISED, columns
from tests.helpers.problems import OPTIONS, Problem
from torch_fattn.inspection.sizes import linear_shapes
from torch_fattn.operators import LINEAR, ROTARY


@dataclass(frozen=True)
class Sizes:
    batch: int = 1
    heads: int = 1
    rows: int = 1
    keys: int = 1
    block: int = 1


DIM = 32  # a group of int4
SIZES = {
    "ones": Sizes(),
    "no keys": Sizes(keys=0),
    "no rows": Sizes(rows=0),
    "no batch": Sizes(batch=0),
    "no heads": Sizes(heads=0),
    "twos": Sizes(2, 2, 2, 2, 2),
}
FORMATS = ("auto", *QUANTISED)


def operand(name: str, op: str, s: Sizes, device: str, kv_format: str) -> Tensor:
    """The argument of that name, in the dtype that needs no conversion."""
    if op in LINEAR:
        return linear_operand(name, op, s, device)
    blocks = -(-s.keys // s.block)
    packed = op.startswith(("paged_prefill", "varlen_"))
    stored = columns(kv_format, DIM)
    shapes: dict[str, tuple[int, ...]] = {
        "query": (s.batch * s.rows, s.heads, DIM) if packed else (s.batch, s.heads, s.rows, DIM),
        "key": (s.batch, s.heads, s.keys, stored),
        "key_cache": (s.batch * blocks, s.block, s.heads, stored),
        "lse": (s.heads, s.batch * s.rows) if packed else (s.batch, s.heads, s.rows),
        "attn_mask": (s.batch, s.heads, s.rows, s.keys),
        "outs": (1, s.batch, s.heads, s.rows, DIM),
        "lses": (1, s.batch, s.heads, s.rows),
        "scores": (s.batch, s.rows, s.keys),
        "x": (s.batch, s.rows, s.keys),
    }
    shapes |= {"out": shapes["query"], "grad_out": shapes["query"], "grad_lse": shapes["lse"]}
    shapes |= {"weight": (s.keys,), "gate": shapes["x"]}
    writes = op in ("cache_write", *ROTARY)
    if op.startswith("varlen_"):
        shapes["key"] = (s.batch * s.keys, s.heads, DIM)
    elif writes:
        of_tokens = (s.batch * s.rows, s.heads, DIM)
        shapes["key"] = of_tokens if op == "cache_write" else shapes["query"]
        shapes["key_cache"] = (s.batch * s.rows, s.block, s.heads, stored)
        shapes |= dict.fromkeys(("cos", "sin"), (s.batch, s.rows, DIM))
        shapes |= dict.fromkeys(("query_norm", "key_norm"), (DIM,))
    if name in ("key_scales", "value_scales"):
        cache = shapes["key_cache" if op.startswith("paged") or writes else "key"][:-1]
        if kv_format == "int4":
            return torch.rand(*cache, DIM // 32, 2, device=device, dtype=torch.float16)
        return torch.rand(cache, device=device)
    numbers = {
        "seq_lens": torch.full((s.batch,), s.keys),
        "block_tables": torch.arange(s.batch * blocks).view(s.batch, blocks),
        "cu_seqlens_q": torch.arange(s.batch + 1) * s.rows,
        "cu_seqlens_k": torch.arange(s.batch + 1) * s.keys,
    }
    if name in numbers:
        return numbers[name].to(torch.int32).to(device)
    if name == "slot_mapping":
        slots = torch.arange(s.batch * s.rows) * s.block
        return (slots.view(s.batch, s.rows) if op in ROTARY else slots).to(device)
    if name == "tree_mask":
        return torch.full((s.batch, s.rows), -1, device=device)
    if (option := OPTIONS.get(name)) and option.tensor:
        problem = Problem(0, op, torch.float32, s.batch, s.heads, s.heads, s.rows, s.keys, DIM, DIM)
        return option.tensor(problem, torch.Generator().manual_seed(0)).to(device)
    if name == "mask_map":
        return torch.ops.fattn.mask_map(operand("attn_mask", op, s, device, kv_format))
    shape = shapes[name.replace("value", "key")]
    stored = "key" in name or "value" in name
    if stored and kv_format != "auto" and not (writes and not name.endswith("_cache")):
        dtype = torch.int8 if kv_format == "int8" else torch.uint8
        return torch.randint(0, 100, shape, device=device).to(dtype)
    return torch.randn(shape, device=device)


def linear_operand(name: str, op: str, s: Sizes, device: str) -> Tensor:
    if name == "has_initial_state":
        return torch.ones(s.batch, dtype=torch.bool, device=device)
    if name in ("slots", "counts"):
        numbers = torch.arange(s.batch) if name == "slots" else torch.full((s.batch,), s.rows)
        return numbers.to(torch.int32).to(device)
    heads = (s.heads, DIM)
    dtype, *shape = linear_shapes(op, torch.float32, (s.batch, s.rows), heads, heads)[name]
    return torch.randn(shape, dtype=dtype, device=device)


def public_operators() -> list[str]:
    names = (name.removeprefix("fattn::") for name in torch._C._dispatch_get_all_op_names())
    return sorted(
        {n for n in names if hasattr(torch.ops.fattn, n) and not n.startswith("_") and "::" not in n}
    )


NUMBERS: dict[str, Callable[[Sizes], float]] = {
    "max_seqlen_q": lambda s: s.rows,
    "max_seqlen_k": lambda s: s.keys,
    "cap": lambda s: 2.0,
}
REQUIRED_OPTIONS = {"paged_prefill": {"is_causal": True}}


def operator_call(op: str, s: Sizes, device: str, kv_format: str) -> dict[str, Any]:
    """All tensors of the schema that this cache format accepts."""
    arguments: dict[str, Any] = dict(REQUIRED_OPTIONS.get(op, {}))
    for argument in getattr(torch.ops.fattn, op).default._schema.arguments:
        if argument.name in NUMBERS:
            arguments[argument.name] = NUMBERS[argument.name](s)
        elif argument.name == "kv_format":
            arguments["kv_format"] = kv_format
        elif argument.name in ("starts", "cu_seqlens", "block_mask", "out_remainder"):
            pass  # not with slot_mapping, a batch, attn_mask or float32
        elif "Tensor" in str(argument.type) and not (kv_format == "auto" and "_scales" in argument.name):
            arguments[argument.name] = operand(argument.name, op, s, device, kv_format)
    return arguments


def written_by(op: str) -> tuple[str, ...]:
    schema = getattr(torch.ops.fattn, op).default._schema
    return tuple(a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write)


def takes_formats(op: str) -> bool:
    return any(a.name == "kv_format" for a in getattr(torch.ops.fattn, op).default._schema.arguments)


OPERATORS = [
    (op, kv_format) for op in public_operators() for kv_format in FORMATS[: None if takes_formats(op) else 1]
]
