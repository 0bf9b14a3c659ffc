"""The functions of flash-attn 2.8, with its names, layouts, argument order and defaults:

    from torch_fattn.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

Tensors are `[batch, length, heads, head_dim]`, packed ones `[total, heads, head_dim]`. Causal masks are
aligned to the lower right corner. A row that sees no key has the result 0 and a log-sum-exp of -inf.
alibi_slopes, `[H]` or `[B, H]`, add `-slope * |i + Lk - Lq - j|` to the score of row i and key j. Head sizes
that are not multiples of 8 are padded on every call. Dense and packed calls are differentiable; calls with
caches are not. Dropout is not supported. `deterministic` has no effect: results and gradients are always
deterministic. Lengths, block tables and indices stay on the device; with FATTN_CHECK=1 in the environment,
values out of range raise ValueError before anything is written.

By keyword, `flash_attn_func`, `flash_attn_varlen_func` and `flash_attn_with_kvcache` also take the arguments
of flash-attn 3 and of vLLM's flash-attn. `learnable_sink` (`s_aux`), `page_table` and `out` mean the same
here. Scheduling arguments have no effect, nor do float8 scales with operands of other dtypes. Arguments that
are not implemented must have their defaults.
"""

import sys

from . import bert_padding as bert_padding
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

__version__ = "2.8.3"  # of flash-attn, for libraries that check it
flash_attn_interface = sys.modules[__name__]  # flash-attn's module of this name defines the functions
__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]
