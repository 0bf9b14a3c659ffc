"""Block masks for `torch_fattn.prefill` and `torch_fattn.attention`: the blocks of keys that each block of
query rows sees.

    scores = patterns.pooled_scores(query, key)
    out = torch_fattn.prefill(query, key, value, block_mask=patterns.top_blocks(scores, 0.3))

A pattern is an approximation: the hidden keys are missing from the result. Masks are bool
`[B or 1, Hq or 1, ceil(Lq / bq), ceil(Lk / bk)]`, True = visible, for blocks of `block_size = (bq, bk)`
tokens, made in plain PyTorch on any device, by few large operations on pooled rows, blocks or tokens.
"""

from __future__ import annotations

from .attention import Pattern, attention_with_means
from .grids import neighborhood, tile_order
from .selection import mass_blocks, of_block_mask, pooled_scores, top_blocks

__all__ = [
    "Pattern",
    "attention_with_means",
    "mass_blocks",
    "neighborhood",
    "of_block_mask",
    "pooled_scores",
    "tile_order",
    "top_blocks",
]
