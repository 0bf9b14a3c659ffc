"""The attention that runs when `fattn` cannot: transformers' sdpa function, with the mask that sdpa gets.

sdpa silently drops soft caps and learned sinks, so a layer with either runs its model's own eager function.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from .call import Call
from .unsupported import warn_once
from .visibility import Lengths, causal_mask


def run_fallback(call: Call, why: str, lengths: Lengths | None = None) -> tuple[Tensor, None] | None:
    """Runs the layer on another function; None if there is none. The lengths of packed sequences become a
    mask, because the other functions ignore lengths."""
    module, query, key, value = call.module, call.query, call.key, call.value
    attention: Callable[..., Any] | None = sdpa_attention_forward
    name, of_scores = "sdpa", {}
    if call.softcap or call.s_aux is not None:
        attention, name = _eager_function(module), "eager"
        of_scores = {"softcap": call.softcap, "s_aux": call.s_aux}
    if attention is None:
        return None
    layer = getattr(module, "layer_idx", None)
    kind = type(module).__name__
    warn_once(
        kind, kind if layer is None else f"{kind}, layer {layer}", f"{why}; {name} attention runs instead"
    )
    is_causal = call.is_causal
    mask = None
    if lengths is not None:
        mask = _of_lengths(call, lengths)
        query, key, value = (
            t.transpose(1, 2).flatten(0, 1).transpose(0, 1)[None] for t in (query, key, value)
        )
    elif call.mask is not None:
        mask, whole_is_causal = call.mask.dense()
        if mask is None:
            is_causal = whole_is_causal
    if name == "eager":
        mask = _additive(call, mask, is_causal)
    out: Tensor = attention(
        module,
        query,
        key,
        value,
        mask,
        dropout=call.dropout,
        scaling=call.scaling,
        sliding_window=call.sliding_window,
        is_causal=is_causal,
        position_bias=call.position_bias,
        **of_scores,
        **call.keywords,
    )[0]
    return out if lengths is None else out[0].unflatten(0, (call.query.shape[0], call.rows)), None


def _of_lengths(call: Call, lengths: Lengths) -> Tensor:
    """bool `[1, 1, rows, keys]` of the whole batch: each row sees the keys of its own sequence. Rows past the
    last sequence see each other, so that every row has a key."""
    causal = getattr(call.module, "is_causal", True) if call.is_causal is None else call.is_causal
    if call.mask is not None:
        causal = call.mask.is_causal
    window = call.window_left
    cu_q, cu_k = lengths.cu_seqlens_q, lengths.cu_seqlens_k
    batch = call.query.shape[0]
    row, key = (torch.arange(batch * n, device=cu_q.device) for n in (call.rows, call.keys))
    sequence_of_row, sequence_of_key = (
        torch.searchsorted(cu[1:].contiguous(), at, right=True) for cu, at in ((cu_q, row), (cu_k, key))
    )
    seen = sequence_of_row[:, None] == sequence_of_key
    last = torch.cat((cu_k[1:] - cu_q[1:], cu_k[-1:] - cu_q[-1:]))  # rows are aligned to the newest key
    distance = (row + last[sequence_of_row])[:, None] - key
    if causal:
        seen = seen & (distance >= 0)
    if window >= 0:
        seen = seen & (distance.abs() <= window)
    return seen[None, None]


def _additive(call: Call, mask: Tensor | None, is_causal: bool | None) -> Tensor | None:
    if mask is None:
        if call.rows == 1 or not is_causal:
            return None
        mask = causal_mask(call.rows, call.keys, call.query.device, call.keys)[None, None]
    if mask.dtype is not torch.bool:
        return mask
    dtype = call.query.dtype
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, torch.finfo(dtype).min)


def _eager_function(module: nn.Module) -> Callable[..., Any] | None:
    """The eager function in the file of the layer's class, or of its first base class that has one."""
    for ancestor in type(module).__mro__:
        found = vars(sys.modules.get(ancestor.__module__, sys)).get("eager_attention_forward")
        if found is not None:
            return found
    return None
