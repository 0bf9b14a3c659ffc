"""Makes a call from sizes: operands on "meta" with the shapes of the operator."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..operators import BACKWARDS
from ..operators.kv_formats import KV_FORMATS

PACKED = ("paged_prefill", "varlen_prefill")
SIZES = (
    *("batch", "heads", "kv_heads", "q_len", "kv_len", "head_dim", "value_dim"),
    *("block_size", "kv_format", "parts"),
)


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
    seq_lens: bool = True,
    mask: torch.dtype | None = None,
) -> tuple[list[Tensor | None], dict[str, Any]]:
    """Operands on "meta" and their keywords. Defaults: as many key-value heads as query heads, values as wide
    as keys, and one query row (prefills and maps: as many as keys). `mask` is the dtype of an attn_mask for
    all heads. A backward has the `out` that `attention` keeps for it."""
    is_backward, op = op in BACKWARDS, op.removesuffix("_backward")
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

    operands: list[Tensor | None]
    keywords: dict[str, Any] = {}
    query_rows = (batch * q_len, heads) if op in PACKED else (batch, heads, q_len)
    query = _tensor("query", dtype, *query_rows, head_dim)
    if op in PACKED:
        keywords["max_seqlen_q"] = q_len
    columns = [head_dim, value_dim]
    if kv_format:
        dtype = KV_FORMATS[kv_format].dtype
        columns = [KV_FORMATS[kv_format].columns(dim) for dim in columns]
    lengths = _tensor("sequence lengths", torch.int32, batch)
    starts = _tensor("starts of the sequences", torch.int32, batch + 1)
    if op.startswith("paged"):
        blocks = -(-kv_len // block_size)
        pool = (batch * blocks, block_size, kv_heads)
        key, value = (
            _tensor("key cache", dtype, *pool, columns[0]),
            _tensor("value cache", dtype, *pool, columns[1]),
        )
        operands = [query, key, value, _tensor("block tables", torch.int32, batch, blocks), lengths]
        if op == "paged_prefill":
            operands.append(starts)
            keywords["is_causal"] = True
    else:
        cache = (batch * kv_len, kv_heads) if op == "varlen_prefill" else (batch, kv_heads, kv_len)
        key, value = _tensor("key", dtype, *cache, columns[0]), _tensor("value", dtype, *cache, columns[1])
        operands = [query, key, value]
        if op == "decode" and seq_lens:
            operands.append(lengths)
        if op == "varlen_prefill":
            operands += [starts, starts]
            keywords["max_seqlen_k"] = kv_len
    if kv_format:
        for name, stored, dim in (("key_scales", key, head_dim), ("value_scales", value, value_dim)):
            shape, of_scales = KV_FORMATS[kv_format].scales(stored.shape[:-1], dim)
            keywords[name] = torch.empty(shape, dtype=of_scales, device="meta")
        keywords["kv_format"] = kv_format
    if is_backward:
        out = _tensor("out", dtype, *query_rows, value_dim)
        lse = _tensor("lse", torch.float32, *(query_rows[::-1] if op in PACKED else query_rows))
        kept = out if dtype == torch.float32 else None
        operands = [torch.empty_like(out), None, *operands[:3], kept, lse, *operands[3:]]
    return operands + masks, keywords


def _tensor(name: str, dtype: torch.dtype, *shape: int) -> Tensor:
    if math.prod(shape) * dtype.itemsize > 2**63 - 1:
        raise ValueError(
            f"the {name} of {' x '.join(map(str, shape))} elements is above 2^63 bytes, the largest tensor "
            "that torch can describe; give smaller sizes"
        )
    return torch.empty(shape, dtype=dtype, device="meta")
