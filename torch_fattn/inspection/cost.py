"""The minimum work of an operator call, bytes and FLOPs, from its sizes and options."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..operators import LINEAR, LOGITS_OPERATORS, ROTARY
from ..operators.kv_formats import head_dim
from ..operators.visibility import Visibility
from .chips import Chip

LSE_BYTES = 4


@dataclass(frozen=True)
class Cost:
    """`flops` counts two per column of each visible pair of a row and a key, in q.k and the weighted sum of
    values; in a backward, in five products. In linear attention: two per element of a state in each of three
    products of a token, and two per tap of a convolution."""

    bytes: int = 0  # operands and results, each counted once
    flops: int = 0
    is_most: bool = False  # an upper bound: lengths, tables or a mask on the device may reduce it

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.bytes + other.bytes, self.flops + other.flops, self.is_most or other.is_most)

    def least_seconds(self, chip: Chip, on_tensors: bool) -> tuple[float, str] | None:
        """The longer of the times for bytes and FLOPs, and the figure behind it; None if the chip's bandwidth
        is not published."""
        if chip.ram_gb_s is None:
            return None
        memory = self.bytes / (chip.ram_gb_s * 1e9), f"memory at {chip.ram_gb_s:.0f} GB/s"
        rate = chip.tensor_operations if on_tensors else chip.products
        if rate is None:
            unknown = "; the rate of its products is not published" if self.flops else ""
            return memory[0], memory[1] + unknown
        return max(memory, (self.flops / rate, f"products at {rate / 1e12:.1f} TFLOP/s"))


def cost_of(op: str, call: Mapping[str, Any], pairs: int | None = None) -> Cost:
    """`call`: the arguments of the operator by name, defaults included. `pairs`: the visible pairs of a row
    and a key, of all heads and sequences, if a block mask hides some."""
    tensors = list({id(each): each for each in call.values() if isinstance(each, Tensor)}.values())
    operands = sum(map(bytes_of, tensors))
    if op == "rms_norm":
        return Cost(operands + call["x"].numel() * (4 if call.get("float32_out") else call["x"].itemsize))
    if op in LINEAR:
        return _linear(call, tensors)
    if op in LOGITS_OPERATORS:
        return Cost(operands + tensors[0].numel() * tensors[0].itemsize)
    if op == "mask_map":
        rows, keys = (1, 1, *tensors[0].shape)[-2:]
        maps = tensors[0].numel() // max(rows * keys, 1)
        return Cost(operands + maps * math.ceil(rows / 16) * math.ceil(keys / 32))
    if op == "merge":
        return Cost(operands + operands // max(len(call["outs"]), 1))
    if op == "cache_write" or op in ROTARY:
        caches = [call.get(name) for name in ("key_cache", "value_cache", "key_scales", "value_scales")]
        written = [each for each in caches if each is not None]
        read = sum(bytes_of(each) for each in tensors if all(each is not one for one in written))
        slot = sum(each[:1, :1].numel() * each.itemsize for each in written)
        tokens = call["key"].shape[0] if op == "cache_write" else call["key"].shape[0] * call["key"].shape[2]
        results = {"cache_write": (), "rotary": ("query", "key"), "rotary_write": ("query",)}[op]
        return Cost(read + tokens * slot + sum(call[name].numel() * call[name].itemsize for name in results))
    return _attention(op.removesuffix("_backward"), op.endswith("_backward"), call, tensors, pairs)


def _linear(call: Mapping[str, Any], tensors: list[Tensor]) -> Cost:
    states = [each for name in ("state", "conv_state") if (each := call.get(name)) is not None]
    first, cu_seqlens = call.get("query", call.get("x")), call.get("cu_seqlens")
    assert first is not None
    sequences = first.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
    passes = 2 if call.get("writes_state", True) else 1  # over the states
    moved = passes * sequences * sum(each[:1].numel() * each.itemsize for each in states)
    others = sum(bytes_of(each) for each in tensors if all(each is not one for one in states))
    result = call.get("value", first)
    taps = call.get("conv_weight", call.get("weight"))
    flops = 0 if taps is None else 2 * first.shape[:2].numel() * taps.numel()
    if result is not first:
        flops += 6 * result.numel() * first.shape[-1]
    return Cost(others + moved + result.numel() * result.itemsize, flops)


def _attention(
    op: str, is_backward: bool, call: Mapping[str, Any], tensors: list[Tensor], in_blocks: int | None
) -> Cost:
    query, is_packed = call["query"], op in ("varlen_prefill", "paged_prefill")
    key, value = (call.get(f"{name}_cache", call.get(name)) for name in ("key", "value"))
    stored = [each for name in ("key_scales", "value_scales") if (each := call.get(name)) is not None]
    cache = [*stored, key] if _is_view(value, key) else [*stored, key, value]
    rows, heads, dim = query.shape if is_packed else (query.shape[2], query.shape[1], query.shape[3])
    value_dim = head_dim(value.shape[-1], call["kv_format"] if value.dtype == torch.uint8 else None)
    if op.startswith("paged"):
        sequences, blocks = call["block_tables"].shape
        keys = blocks * key.shape[1]
        capacity = sequences * keys
        filled = capacity * sum(each[:1, :1].numel() * each.itemsize for each in cache)
    else:
        sequences = call["cu_seqlens_q"].numel() - 1 if is_packed else query.shape[0]
        keys = min(call["max_seqlen_k"], key.shape[0]) if is_packed else key.shape[2]
        capacity = key.shape[0] if is_packed else sequences * keys
        filled = sum(map(bytes_of, cache))
    most_rows = min(call["max_seqlen_q"], rows) if is_packed else rows
    pairs, seen = pairs_and_keys(most_rows, keys, call, call.get("is_causal", op.endswith("decode")))
    pairs = min(sequences * pairs, rows * keys) if is_packed else sequences * pairs
    read = filled * min(sequences * seen, capacity) // max(capacity, 1)
    others = sum(bytes_of(each) for each in tensors if all(each is not one for one in (*cache, value)))
    results = query.numel() // dim * (value_dim * query.itemsize + LSE_BYTES)
    if is_backward:  # the gradients of query, key and value
        results = sum(each.numel() * each.itemsize for each in (query, key, value))
    columns = 3 * dim + 2 * value_dim if is_backward else dim + value_dim
    masks = ("attn_mask", "tree_mask") if in_blocks is not None else ("attn_mask", "tree_mask", "block_mask")
    is_most = any(call.get(name) is not None for name in ("seq_lens", "cu_seqlens_q", *masks))
    pairs = pairs * heads if in_blocks is None else in_blocks
    return Cost(others + read + results, 2 * pairs * columns, is_most)


def bytes_of(operand: Tensor) -> int:
    """The bytes of an operand; expanded dimensions count once."""
    sizes = zip(operand.shape, operand.stride(), strict=True)
    return math.prod(size for size, stride in sizes if stride or size == 0) * operand.itemsize


def _is_view(value: Tensor, key: Tensor) -> bool:
    """Whether the value is the first columns of the key."""
    return (
        value.untyped_storage()._cdata == key.untyped_storage()._cdata
        and value.storage_offset() == key.storage_offset()
        and value.stride() == key.stride()
    )


def pairs_and_keys(rows: int, keys: int, call: Mapping[str, Any], is_causal: bool) -> tuple[int, int]:
    """The number of visible pairs of a row and a key by position, and of keys that any row sees."""
    if rows == 0:
        return 0, 0
    offset = call.get("q_offset")
    first = keys - rows if offset is None else offset
    visibility = Visibility.of(call, is_causal=is_causal)
    begin, end = visibility.window(first)[0], visibility.window(first + rows - 1)[1]
    sinks = max(min(visibility.sinks(first + rows - 1), keys), 0)
    return visibility.pairs(first, rows, keys), sinks + max(min(end, keys) - max(begin, sinks), 0)
