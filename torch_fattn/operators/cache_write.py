"""`cache_write` as a Python function, documented. All work is in `torch.ops.fattn`."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import Unpack

from ..runtime.signatures import public
from .options import StorageOptions

__all__ = ["cache_write"]


@public("fattn.cache_write", options="cache_write")
def cache_write(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    **options: Unpack[StorageOptions],
) -> None:
    """Writes the keys and values of tokens into slots of a paged cache, quantised if the cache is.

    Args:
        key, value: `[T, Hkv, D]` and `[T, Hkv, Dv]`, float32, float16 or bfloat16; D and Dv are multiples of
            8 up to 576. Any strides.
        key_cache, value_cache: `[num_blocks, block_size, Hkv, D]` and `[.., Dv]`, written in place. Elements
            must not overlap, and the last dimension is contiguous; otherwise any strides: a pool
            `[num_blocks, Hkv, block_size, D]` is passed as `pool.transpose(1, 2)`, a dense cache `[B, Hkv,
            capacity, D]` likewise. For int4 the last dimension holds D / 2 bytes.
        slot_mapping: int32 or int64 `[T]`, `block * block_size + slot` of each token. A negative slot drops
            the token, as does one beyond the cache; with FATTN_CHECK=1 in the environment the latter raises
            ValueError, and so do two tokens with one slot, which otherwise race in each column.
        key_scales, value_scales: of a quantised cache, written in place: float32 `[num_blocks, block_size,
            Hkv]`, any strides; for int4 float16 `[num_blocks, block_size, Hkv, D / 32, 2]` whose last two
            dimensions are contiguous. For fp8_e4m3 they may be omitted: every scale is 1.
        kv_format: "auto" derives it from the dtype of the caches: with the dtype of key, rows are stored
            unchanged, bit by bit, and int8 is "int8". uint8 storage needs "fp8_e4m3" or "int4" (which needs D
            and Dv to be multiples of 32).

    `torch_fattn.reference.kv_formats` defines every format exactly, with its errors, its rounding and NaN.

    In multi-head latent attention the value is the first columns of the key: pass value, value_cache and
    value_scales as views of their key counterparts, which are written once.

    Caches do not support gradients: a cache that requires grad raises RuntimeError unless gradients are off.
    Other errors are those of `prefill`. Nothing is written after an error.
    """
    torch.ops.fattn.cache_write(key, value, key_cache, value_cache, slot_mapping, **options)
