"""Key-value caches to generate with: `StaticKVCache` for a fixed batch, `PagedKVCache` for sequences that
come, go and share prefixes. Both hold all layers of a model and are used alike:

    step = cache.extend(...)                     # room for new tokens of some sequences, once for all layers
    for layer, block in enumerate(model):
        query, key, value = block.project(x, step.positions)
        cache.append(layer, step, key, value)    # [tokens, kv_heads, dim]: the new tokens, packed
        out = cache.decode(layer, step, query)   # [batch, heads, rows, dim]: the newest rows of each sequence

`decode` takes up to 16 rows of each sequence. `PagedKVCache.prefill` takes all new tokens of a step, whole
prompts among them; beside a `StaticKVCache`, prompts are the business of `torch_fattn.prefill`.

What belongs to whom is decided on the host. Lengths and block tables are on the device and changed there, so
that nothing here waits for the GPU. The classes are not for use from several threads at once.
"""

from .paged import PagedKVCache
from .static import StaticKVCache
from .step import CacheFullError, CacheStep

__all__ = ["CacheFullError", "CacheStep", "PagedKVCache", "StaticKVCache"]
