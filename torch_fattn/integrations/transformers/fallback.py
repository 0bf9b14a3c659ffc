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

from .patterns import is_packed, is_pattern, read_packed, read_pattern
from .policy import warn_once


def run_fallback(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    why: str,
    lengths: tuple[Tensor, Tensor] | None = None,
    *,
    softcap: float | None,
    s_aux: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None] | None:
    """Takes the arguments of the attention function, with its keywords. Returns None if no other function
    computes this layer. The cumulative `lengths` of packed sequences become a mask, because the other
    functions do not read lengths."""
    attention: Callable[..., Any] | None = sdpa_attention_forward
    name = "sdpa"
    if softcap or s_aux is not None:
        attention, name = _eager_function(module), "eager"
        options |= {"softcap": softcap, "s_aux": s_aux}
    if attention is None:
        return None
    layer = getattr(module, "layer_idx", None)
    kind = type(module).__name__
    warn_once(
        kind, kind if layer is None else f"{kind}, layer {layer}", f"{why}; {name} attention runs instead"
    )
    rows, keys = query.shape[2], key.shape[2]
    batch = query.shape[0]
    if lengths is not None:
        window = (options.get("sliding_window") or 0) - 1
        declared = options.get("is_causal")
        causal = bool(getattr(module, "is_causal", True) if declared is None else declared)
        if mask is not None:
            causal = mask.ndim == 2 or is_pattern(mask)
        if mask is not None and mask.ndim == 4:
            window = read_pattern(mask, rows, keys).window_left if causal else -1  # type: ignore[union-attr]
        query, key, value = (
            t.transpose(1, 2).flatten(0, 1).transpose(0, 1)[None] for t in (query, key, value)
        )
        mask = _of_lengths(*lengths, batch * rows, batch * keys, causal, window)
    elif mask is not None:
        mask, is_causal = without_patterns(mask, rows, keys)
        if mask is None:
            options["is_causal"] = is_causal
    if name == "eager":
        mask = _additive(
            mask, query, rows, keys, options.get("is_causal", getattr(module, "is_causal", True))
        )
    out: Tensor = attention(module, query, key, value, mask, **options)[0]
    return out if lengths is None else out[0].unflatten(0, (batch, rows)), None


def without_patterns(mask: Tensor, rows: int, keys: int) -> tuple[Tensor | None, bool]:
    """Converts the mask of the attention function to the 4D mask of sdpa. Returns None and whether the layer
    is causal if sdpa's own convention (row i sees key i) is equivalent."""
    if mask.dtype is torch.bool and not any(mask.stride()):  # hides nothing
        causal = mask.ndim == 2 and rows > 1
        if not causal or rows == keys:
            return None, causal
        return _causal(mask, rows, keys), causal
    if mask.ndim == 2:
        seen = mask[:, None, None, :]
        return (seen if rows == 1 else seen & _causal(mask, rows, keys)), True
    if is_packed(mask):
        return _of_packed(mask, rows, keys), True
    if is_pattern(mask):
        return _of_pattern(mask, rows, keys), True
    return mask, False


def _causal(
    like: Tensor, rows: int, keys: int, filled: Tensor | int | None = None, window: int = -1
) -> Tensor:
    """bool `[1 or B, 1, rows, keys]`; the last row belongs to the newest filled key."""
    last = keys if filled is None else filled
    position = torch.arange(rows, device=like.device)[:, None] + (last - rows)
    key = torch.arange(keys, device=like.device)
    seen = key <= position
    if window >= 0:
        seen = seen & (key >= position - window)
    return seen if seen.ndim == 4 else seen[None, None]


def _of_pattern(mask: Tensor, rows: int, keys: int) -> Tensor:
    pattern = read_pattern(mask, rows, keys)
    if pattern is None:
        raise ValueError(f"the causal pattern {tuple(mask.shape)} does not have {rows} rows and {keys} keys")
    filled: Tensor | int = pattern.keys
    if pattern.seq_lens is not None:
        filled = pattern.seq_lens[:, None, None, None]
    seen = _causal(mask, rows, keys, filled, pattern.window_left)
    if pattern.padding is not None:
        real = torch.nn.functional.pad(pattern.padding == 0, (0, keys - pattern.keys))
        seen = seen & real
    return seen


def _of_packed(mask: Tensor, rows: int, keys: int) -> Tensor:
    packed = read_packed(mask)
    total = int(packed.cu_seqlens[-1])
    tokens = torch.arange(total, device=mask.device)
    sequence = torch.searchsorted(packed.cu_seqlens[1:].contiguous(), tokens, right=True).view(-1, 1, 1, keys)
    seen = sequence.transpose(2, 3) == sequence
    return seen & _causal(mask, rows, keys, window=packed.window_left)


def _of_lengths(cu_q: Tensor, cu_k: Tensor, rows: int, keys: int, causal: bool, window: int) -> Tensor:
    """bool `[1, 1, rows, keys]`: each row sees the keys of its own sequence. Rows past the last sequence see
    one another, so that every row has a key."""
    row, key = (torch.arange(n, device=cu_q.device) for n in (rows, keys))
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


def _additive(mask: Tensor | None, query: Tensor, rows: int, keys: int, causal: bool | None) -> Tensor | None:
    if mask is None:
        if rows == 1 or not causal:
            return None
        mask = _causal(query, rows, keys)
    if mask.dtype is not torch.bool:
        return mask
    lowest = torch.finfo(query.dtype).min
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, lowest)


def _eager_function(module: nn.Module) -> Callable[..., Any] | None:
    """The eager function in the file of the layer's class, or of its first base class that has one."""
    for ancestor in type(module).__mro__:
        found = vars(sys.modules.get(ancestor.__module__, sys)).get("eager_attention_forward")
        if found is not None:
            return found
    return None
