"""Key-value caches for generation: `StaticKVCache` for a fixed batch, `PagedKVCache` for sequences that come,
go and share prefixes. Both hold all layers of a model and have the same interface:

    step = cache.extend(sequences, tokens=...)   # room for new tokens of the sequences, once for all layers
    for layer, block in enumerate(model):
        query, key, value = block.project(x, step.positions)
        cache.append(layer, step, key, value)    # [tokens, kv_heads, dim]: the new tokens, packed
        out = cache.decode(layer, step, query)   # [batch, heads, rows, dim]: the newest rows of each sequence

`decode` takes the same number of rows for each sequence, padded or packed; `prefill` takes all new tokens of
a step, packed.

The host assigns blocks to sequences. Lengths and block tables are updated on the device, so only methods that
copy to host memory or a file wait for the GPU. The classes are not thread-safe.
"""

from .paged import CacheStats, PagedKVCache
from .static import StaticKVCache
from .step import CacheFullError, CacheStep

__all__ = ["CacheFullError", "CacheStats", "CacheStep", "PagedKVCache", "StaticKVCache"]
