"""The functions of flash-attn 2.8 under their names, with its layouts, argument order and defaults:

    from torch_fattn.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

Tensors are `[batch, length, heads, head_dim]`, packed ones `[total, heads, head_dim]`; causal is that of the
lower right corner; a row that sees no key is 0, and its log-sum-exp -inf. alibi_slopes, `[H]` or `[B, H]`,
add `-slope * |i + Lk - Lq - j|` to the score of row i and key j. Head sizes that are no multiple of 8 are
padded on every call. There is no backward and no dropout. `deterministic` and `num_splits` change nothing:
results are always the same from run to run. Lengths, block tables and indices stay on the device; with
FATTN_CHECK=1 in the environment those out of range raise ValueError before anything is written.
"""

from .cache import flash_attn_with_kvcache
from .dense import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
)
from .varlen import (
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]
