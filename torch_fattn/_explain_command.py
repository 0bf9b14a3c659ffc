"""`python -m torch_fattn explain`: the plan of a call, described by its sizes."""

from __future__ import annotations

import argparse
import math
import re
from typing import Any

import torch
from torch import Tensor

from ._arguments import DTYPES, Parser, whole
from ._kv_formats import INT4_GROUP
from .plans import FAMILIES, MOST_CORES, OPERATORS, explain

MOST = 2**31 - 1
ATTENTION = ("prefill", "decode", "paged_decode", "paged_prefill", "varlen_prefill")
PACKED = ("paged_prefill", "varlen_prefill")
# Options that not every operator has; the others refuse them.
USED_BY = {
    "kv_heads": ATTENTION,
    "kv_len": (*ATTENTION, "mask_map"),
    "value_dim": ATTENTION,
    "block_size": ("paged_decode", "paged_prefill"),
    "kv_format": ("decode", "paged_decode", "paged_prefill"),
    "parts": ("merge",),
    "causal": ("prefill", "varlen_prefill"),
    "mask": ("prefill", "mask_map"),
}
WHY_NOT = {
    ("decode", "causal"): "its rows are the last ones of their sequences and causal always",
    ("paged_prefill", "causal"): "its rows are causal by default",
    ("paged_decode", "causal"): "its rows are the last ones of their sequences and causal always",
}
FAMILY_OF_GENERATION = {"M1": 7, "M2": 8, "M3": 9, "M4": 9, "M5": 10}


def add_arguments(parser: Parser) -> None:
    size = whole(1, MOST)
    parser.add_argument("op", choices=(*OPERATORS, "mask_map"))
    parser.add_argument("--batch", type=size, default=1)
    parser.add_argument("--heads", type=size, default=32, help="query heads")
    parser.add_argument("--kv-heads", type=size, help="key-value heads; default: as many as query heads")
    parser.add_argument("--q-len", type=size, help="query rows; default: 1, for the prefills --kv-len")
    parser.add_argument("--kv-len", type=size, help="keys, or a decode's cache capacity; default: 1024")
    parser.add_argument("--head-dim", type=size, default=128)
    parser.add_argument("--value-dim", type=size, help="default: --head-dim")
    parser.add_argument("--block-size", type=size, help="the paged ones: keys per block; default: 16")
    parser.add_argument(
        "--kv-format", choices=("int8", "fp8_e4m3", "int4"), help="of a quantised cache; default: --dtype"
    )
    parser.add_argument("--parts", type=size, help="merge: partial results; default: 2")
    parser.add_argument("--dtype", choices=DTYPES, default="float16")
    parser.add_argument("--causal", action="store_const", const=True, help="prefill: is_causal")
    parser.add_argument(
        "--mask", choices=("bool", *DTYPES), help="dtype of an attn_mask for all heads; of mask_map: bool"
    )
    parser.add_argument("--family", type=whole(FAMILIES[0], FAMILIES[-1]), help="n of MTLGPUFamilyApple<n>")
    parser.add_argument(
        "--cores", type=whole(1, MOST_CORES), help="of the GPU; default: those of an Apple M1"
    )
    parser.add_argument("--device-name", help="what to call that GPU; needs --family and --cores")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(parser: Parser, options: argparse.Namespace) -> int:
    """Prints the plan. A call that the planner refuses is a wrong argument too."""
    _check_use(parser, options)
    _check_device(parser, options)
    operands = _operands(parser, options)
    keywords: dict[str, Any] = {}
    if options.op in USED_BY["causal"]:
        keywords["is_causal"] = bool(options.causal)
    if options.op in PACKED:
        keywords["max_seqlen_q"] = operands[0].shape[0] // options.batch
    if options.op == "varlen_prefill":
        keywords["max_seqlen_k"] = operands[1].shape[0] // options.batch
    if options.kv_format:
        keywords |= _scales(options.kv_format, *operands[1:3])
    try:
        plan = explain(
            options.op,
            *operands,
            **keywords,
            device_name=options.device_name,
            family=options.family,
            cores=options.cores,
        )
    except (RuntimeError, TypeError, ValueError) as refusal:
        parser.refuse(str(refusal).splitlines()[0])
    print(plan.json if options.json else plan)
    return 0


def _check_use(parser: Parser, options: argparse.Namespace) -> None:
    for name, operators in USED_BY.items():
        if getattr(options, name) is not None and options.op not in operators:
            why = WHY_NOT.get((options.op, name), f"it belongs to {', '.join(operators)}")
            parser.refuse(f"{options.op} takes no --{name.replace('_', '-')}: {why}; leave it out")


def _check_device(parser: Parser, options: argparse.Namespace) -> None:
    name = options.device_name
    if name is None:
        return
    if not (name.strip() and name.isprintable()):
        parser.refuse(f"--device-name {ascii(name)} is not a printable name; write one or leave it out")
    if options.family is None or options.cores is None:
        parser.refuse(
            f"--device-name {name!r} is only a name, and a plan depends on the GPU's figures; "
            "give --family and --cores with it"
        )
    generation = re.match(r"(?:Apple )?(M\d)\b", name)
    family = FAMILY_OF_GENERATION.get(generation.group(1)) if generation else None
    if family not in (None, options.family):
        parser.refuse(
            f"--device-name {name!r} is of Apple family {family}, not {options.family}; "
            f"give --family {family} or another name"
        )


def _operands(parser: Parser, options: argparse.Namespace) -> list[Tensor]:
    """Tensors of the asked shapes, without memory."""
    batch, heads, head_dim = options.batch, options.heads, options.head_dim
    kv_heads = options.kv_heads or heads
    value_dim = options.value_dim or head_dim
    kv_len = options.kv_len or 1024
    q_len = options.q_len or (kv_len if options.op.endswith(("prefill", "map")) else 1)
    block_size = options.block_size or 16

    def tensor(name: str, dtype: torch.dtype, *shape: int) -> Tensor:
        if math.prod(shape) * dtype.itemsize > 2**63 - 1:
            parser.refuse(
                f"the {name} of {' x '.join(map(str, shape))} elements is above 2^63 bytes, the largest "
                "tensor that torch can describe; give smaller sizes"
            )
        return torch.empty(shape, dtype=dtype, device="meta")

    dtype = getattr(torch, options.dtype)
    mask = []
    if options.mask or options.op == "mask_map":
        mask.append(tensor("mask", getattr(torch, options.mask or "bool"), batch, 1, q_len, kv_len))
    if options.op == "mask_map":
        return mask
    if options.op == "merge":
        parts = (options.parts or 2, batch, heads, q_len)
        return [tensor("outs", dtype, *parts, head_dim), tensor("lses", torch.float32, *parts)]
    rows = (batch * q_len, heads) if options.op in PACKED else (batch, heads, q_len)
    query = tensor("query", dtype, *rows, head_dim)
    columns = [head_dim, value_dim]
    if options.kv_format:
        dtype = torch.int8 if options.kv_format == "int8" else torch.uint8
        columns = [dim // 2 if options.kv_format == "int4" else dim for dim in columns]
    if options.op.startswith("paged"):
        blocks = -(-kv_len // block_size)
        pool = (batch * blocks, block_size, kv_heads)
        caches = [
            tensor("key cache", dtype, *pool, columns[0]),
            tensor("value cache", dtype, *pool, columns[1]),
        ]
        tables = tensor("block tables", torch.int32, batch, blocks)
        paged = [query, *caches, tables, tensor("sequence lengths", torch.int32, batch)]
        if options.op == "paged_prefill":
            paged.append(tensor("starts of the sequences", torch.int32, batch + 1))
        return paged
    cache = (batch * kv_len, kv_heads) if options.op == "varlen_prefill" else (batch, kv_heads, kv_len)
    operands = [query, tensor("key", dtype, *cache, columns[0]), tensor("value", dtype, *cache, columns[1])]
    if options.op == "decode":
        operands.append(tensor("sequence lengths", torch.int32, batch))
    if options.op == "varlen_prefill":
        operands += [tensor("starts of the sequences", torch.int32, batch + 1)] * 2
    return operands + mask


def _scales(kv_format: str, key: Tensor, value: Tensor) -> dict[str, Any]:
    """The keywords of a quantised cache."""

    def scales(cache: Tensor) -> Tensor:
        if kv_format == "int4":
            groups = (*cache.shape[:-1], cache.shape[-1] * 2 // INT4_GROUP, 2)
            return torch.empty(groups, dtype=torch.float16, device="meta")
        return torch.empty(cache.shape[:-1], device="meta")

    return {"key_scales": scales(key), "value_scales": scales(value), "kv_format": kv_format}
