"""`rotary` and `rotary_write` as Python functions, documented. All work is in `torch.ops.fattn`."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import Unpack

from ..runtime.signatures import public
from .options import RotaryOptions, RotaryWriteOptions

__all__ = ["rotary", "rotary_write"]


@public("fattn.rotary", options="rotary")
def rotary(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, **options: Unpack[RotaryOptions]
) -> tuple[Tensor, Tensor]:
    """Normalises the heads of query and key, if norms are given, and rotates pairs of their columns, in one
    launch: `x * cos - y * sin` and `y * cos + x * sin`.

    Rounding is that of transformers. With tables in the dtype of query, each product is rounded, then the
    sum; with float32 tables only the sum. float16 and bfloat16 results without a norm have transformers'
    bits. A norm sums in another order, which may move a rounding.

    Args:
        query, key: `[B, Hq, L, D]` and `[B, Hkv, L, D]`, float32, float16 or bfloat16; D is a multiple of 4
            up to 576. Any strides, as of views of one projection; any number of heads, including 0.
        cos, sin: `[B, L, R]`, or `[1, L, R]` for all sequences, in the dtype of query or float32: the tables'
            rows at the positions of the tokens. Any strides. Columns p and p + R / 2 are for the two numbers
            of pair p; tables of R / 2 columns have one column for both, and need rotary_dim.
        token_major_out: results are transposed views of `[B, L, H, D]` in memory.

    Returns:
        query and key, rotated, in new memory.

    Raises:
        TypeError: dtypes.
        ValueError: shapes, devices, unknown names.
        NotImplementedError: D above 576.
        RuntimeError: gradients, in the backward.
    """
    return torch.ops.fattn.rotary(query, key, cos, sin, **options)


@public("fattn.rotary_write", options="rotary_write")
def rotary_write(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor | None = None,
    **options: Unpack[RotaryWriteOptions],
) -> Tensor:
    """`rotary`, and the write of the rotated key and the value into a dense or paged cache, in one launch.
    The cache has the bits of `rotary` followed by `cache_write`.

        query = torch_fattn.rotary_write(query, key, value, cos, sin, *pools, slot_mapping)
        dense = (cache.transpose(1, 2) for cache in (key_cache, value_cache))
        query = torch_fattn.rotary_write(query, key, value, cos, sin, *dense, start=9)

    Args:
        query, key, cos, sin: as in `rotary`.
        value: `[B, Hkv, L, Dv]`, Dv a multiple of 4 up to 576. Any strides.
        key_cache, value_cache: `[num_blocks, block_size, Hkv, D]` and `[.., Dv]`, written in place; a dense
            cache `[B, Hkv, capacity, D]` is passed as `.transpose(1, 2)`. They, scales and kv_format are as
            in `cache_write`, except that the caches must not share memory.
        slot_mapping: int32 or int64 `[B, L]`, `block * block_size + slot` of each token. A negative slot, or
            one beyond the cache, drops key and value of the token, but not its query. Default: block b is of
            sequence b, whose tokens take adjacent slots from start on.

    Returns:
        the rotated query, in new memory.

    Errors are those of `rotary` and `cache_write`. Nothing is written after an error.
    """
    return torch.ops.fattn.rotary_write(
        query, key, value, cos, sin, key_cache, value_cache, slot_mapping, **options
    )
