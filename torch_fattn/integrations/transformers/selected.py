"""Models that select keys for each row: DeepSeek V3.2 and its relatives by position (`indices`), MiniMax-M3
by blocks of positions (`block_indices`).

`sparse_decode` reads the selected keys of each row. With a mask, `prefill` reads every key once for a tile of
rows, which is less if they select many of the keys.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...operators.differentiable import needs_gradient
from ...operators.head_padding import pad_heads, without_padding
from ...operators.sparse import is_one_cache, sparse_decode
from .fallback import without_patterns

_ROWS_OF_A_TILE = 32


def take_selection(module: nn.Module, keywords: dict[str, Any], keys: int) -> Tensor | None:
    """Removes a selection from the keywords. Returns positions `[B, 1 or Hkv, Lq, K]`, where -1 is none."""
    indices: Tensor | None = keywords.get("indices")
    if indices is not None and indices.ndim == 3:
        del keywords["indices"]
        return indices.long()[:, None]
    blocks: Tensor | None = keywords.get("block_indices")
    size = getattr(getattr(module, "indexer", None), "block_size", None)
    if blocks is None or blocks.ndim != 4 or not isinstance(size, int):
        return None
    del keywords["block_indices"]
    first = blocks.long()[..., None] * size
    at = first + torch.arange(size, device=blocks.device)
    return at.masked_fill((first < 0) | (at >= keys), -1).flatten(-2)


def reads_selected(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, selected: Tensor, sinks: Tensor | None
) -> bool:
    """Whether `compute_selected` can compute the layer, and a tile of rows reads fewer keys by it."""
    _batch, heads, rows, count = selected.shape
    if heads > 1 and (heads != key.shape[1] or sinks is not None):
        return False
    if needs_gradient(query, key, value, sinks):
        return False
    if mask is not None and (mask.dtype is not torch.bool or mask.shape[1] != 1):
        return False
    return min(rows, _ROWS_OF_A_TILE) * count < key.shape[2]


def compute_selected(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, selected: Tensor, **options: Any
) -> Tensor:
    """Attention of query, key and value `[B, H, L, ..]` over the selected keys that the mask `[B, 1, Lq, Lk]`
    shows; out is `[B, Lq, Hq, Dv]`."""
    if mask is not None:
        seen = mask.expand(*selected.shape[:3], key.shape[2]).gather(-1, selected.clamp(min=0))
        selected = selected.masked_fill(~seen, -1)
    value_dim = value.shape[-1]
    query, key, value, options["scale"] = pad_heads(query, key, value, options.get("scale"))
    per_head = selected.shape[1] > 1
    if not is_one_cache(key, value, per_head):  # without a cache, models transpose one of them
        key, value = key.contiguous(), value.contiguous()
    indices = selected if per_head else selected[:, 0]
    out = sparse_decode(query, key, value, indices, is_causal=mask is None, **options)
    return without_padding(out.transpose(1, 2), value_dim).contiguous()


def whole_mask(mask: Tensor | None, rows: int, keys: int) -> Tensor | None:
    """The 4D mask of any form of mask; None if it only hides later keys."""
    if mask is None:
        return None
    whole, causal = without_patterns(mask, rows, keys)
    if whole is None and rows > 1 and not causal:
        return mask.new_ones(()).expand(1, 1, rows, keys)
    return whole


def mask_of_selected(mask: Tensor | None, selected: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """A whole mask restricted to the selected keys, `[B, 1 or Hq, Lq, Lk]`."""
    batch, of_heads, rows, _count = selected.shape
    heads, keys = query.shape[1], key.shape[2]
    seen = torch.zeros((batch, of_heads, rows, keys + 1), dtype=torch.bool, device=selected.device)
    seen = seen.scatter_(-1, selected.masked_fill(selected < 0, keys), True)[..., :keys]
    if of_heads > 1:
        seen = seen.repeat_interleave(heads // of_heads, dim=1)
    if mask is None:
        row, key = (torch.arange(n, device=seen.device) for n in (rows, keys))
        return seen & (key <= row[:, None] + (keys - rows))
    return seen & mask if mask.dtype is torch.bool else mask.masked_fill(~seen, -torch.inf)
