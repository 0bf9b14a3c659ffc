"""Models that select keys for each row: DeepSeek V3.2 and its relatives by position (`indices`), MiniMax-M3
by blocks of positions (`block_indices`).

`sparse_decode` reads the selected keys of each row. `prefill` with a mask reads every key once per tile of
rows, which is less if rows select many of the keys.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ...operators.differentiable import needs_gradient
from ...operators.head_padding import pad_heads, without_padding
from ...operators.sparse import is_one_cache, sparse_decode
from .call import Call
from .unsupported import falls_back, refusal_of_operator, refuse_keywords
from .visibility import causal_mask, nothing_hidden, read

_ROWS_OF_A_TILE = 32


def take_selection(call: Call) -> tuple[Call, Tensor | None]:
    """Splits off the call's selection, as positions `[B, 1 or Hkv, Lq, K]`; -1 is empty."""
    keywords = call.keywords
    indices: Tensor | None = keywords.get("indices")
    if indices is not None and indices.ndim == 3:
        return _without(call, "indices"), indices.long()[:, None]
    blocks: Tensor | None = keywords.get("block_indices")
    size = getattr(getattr(call.module, "indexer", None), "block_size", None)
    if blocks is None or blocks.ndim != 4 or not isinstance(size, int):
        return call, None
    first = blocks.long()[..., None] * size
    at = first + torch.arange(size, device=blocks.device)
    selected = at.masked_fill((first < 0) | (at >= call.keys), -1).flatten(-2)
    return _without(call, "block_indices"), selected


def _without(call: Call, name: str) -> Call:
    return replace(call, keywords={each: call.keywords[each] for each in call.keywords if each != name})


def whole_mask(call: Call) -> Tensor | None:
    """The call's mask in its 4D form; None if it only hides later keys."""
    if call.mask is None:
        return None
    whole, causal = call.mask.dense()
    if whole is None and call.rows > 1 and not causal:
        return nothing_hidden(call.mask.device, 1, 1, call.rows, call.keys)
    return whole


def attend_selected(call: Call, mask: Tensor | None, selected: Tensor) -> Tensor | None:
    """Attention that reads only the selected keys; None if a mask is cheaper or required. out is `[B, Lq, Hq,
    Dv]`."""
    if not _reads_selected(call, mask, selected):
        return None
    refuse_keywords(call.module, call.keywords, separates=mask is not None)
    try:
        return _compute_selected(call, mask, selected)
    except (NotImplementedError, TypeError, ValueError) as refusal:
        if not falls_back():
            raise refusal_of_operator(call.module, refusal) from refusal
        return None


def _reads_selected(call: Call, mask: Tensor | None, selected: Tensor) -> bool:
    """Whether `sparse_decode` can run the layer and reads fewer keys per tile of rows."""
    _batch, heads, rows, count = selected.shape
    if call.sliding_window is not None or call.position_bias is not None:
        return False
    if call.module.training and call.dropout > 0:
        return False
    if heads > 1 and (heads != call.key.shape[1] or call.s_aux is not None):
        return False
    if needs_gradient(call.query, call.key, call.value, call.s_aux):
        return False
    if mask is not None and (mask.dtype is not torch.bool or mask.shape[1] != 1):
        return False
    return min(rows, _ROWS_OF_A_TILE) * count < call.keys


def _compute_selected(call: Call, mask: Tensor | None, selected: Tensor) -> Tensor:
    """Attention over the selected keys that the mask `[B, 1, Lq, Lk]` shows."""
    if mask is not None:
        seen = mask.expand(*selected.shape[:3], call.keys).gather(-1, selected.clamp(min=0))
        selected = selected.masked_fill(~seen, -1)
    query, key, value, scale = pad_heads(call.query, call.key, call.value, call.scaling)
    per_head = selected.shape[1] > 1
    if not is_one_cache(key, value, per_head):  # without a cache, models transpose key or value
        key, value = key.contiguous(), value.contiguous()
    indices = selected if per_head else selected[:, 0]
    options = call.options | {"scale": scale, "is_causal": mask is None}
    out = sparse_decode(query, key, value, indices, **options)
    return without_padding(out.transpose(1, 2), call.value.shape[-1]).contiguous()


def with_mask_of(call: Call, mask: Tensor | None, selected: Tensor) -> Call:
    """The call with a whole mask `[B, 1 or Hq, Lq, Lk]`, limited to the selected keys."""
    batch, of_heads, rows, _count = selected.shape
    heads, keys = call.query.shape[1], call.keys
    seen = torch.zeros((batch, of_heads, rows, keys + 1), dtype=torch.bool, device=selected.device)
    seen = seen.scatter_(-1, selected.masked_fill(selected < 0, keys), True)[..., :keys]
    if of_heads > 1:
        seen = seen.repeat_interleave(heads // of_heads, dim=1)
    if mask is None:
        seen = seen & causal_mask(rows, keys, seen.device, keys)
    elif mask.dtype is torch.bool:
        seen = seen & mask
    else:
        seen = mask.masked_fill(~seen, -torch.inf)
    return replace(call, mask=read(seen, call.rows, call.keys))
