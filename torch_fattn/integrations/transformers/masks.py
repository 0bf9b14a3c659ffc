"""The mask function: encodes a layer pattern and the padding in the shortest form that the model accepts.

    2D bool  `[B, Lk]`, True = a real token: the pattern is causal, rows aligned to the newest key
    4D int32 a pattern of `visibility`: causal, with a window, over a partly filled cache, or in each packed
             sequence
    4D `[B or 1, H or 1, Lq or 1, Lk]`, bool or additive: complete, causality included

Every form contains the pattern. As under eager attention, a layer's own causal flag or window no longer
matters. `None` is ambiguous and never returned: a mask that hides no key is a single expanded True, which the
attention function recognises by its strides and does not read.

The first two forms are only for causal patterns, with or without a window, and only for models that declare
flash attention and so expect no 4D mask. All others (chunks, prefix tuning, padding with many rows after the
keys of a static cache) are the 4D masks that transformers builds for its own implementations. Recurrent
models get their padding as additive 4D masks, which hide by a finite number: a row that sees no key is then
the mean of all values, as under eager attention, and affects later tokens through the state. The row of a
single new token sees itself, and needs no such mask. An attention
function without a mask function would silently lose padding.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    eager_mask,
    sdpa_mask,
    sliding_window_causal_mask_function,
)
from transformers.utils.import_utils import is_tracing

from ...runtime.signatures import public
from .compat import and_parts, closed_over, made_like, packed_parts
from .packing import start_forward
from .support import MaskForm, is_recurrent, mask_form, refusal_of_model
from .unsupported import falls_back, warn_once
from .visibility import nothing_hidden, write_packed, write_pattern


@public("torch_fattn.integrations.transformers.make_mask", ahead=False)
def make_mask(
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    config: PreTrainedConfig,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor:
    """Called by transformers' `create_*_mask` with keywords only. For a model outside the attention interface
    it returns an additive mask under `on_unsupported="sdpa"`, and otherwise raises NotImplementedError."""
    start_forward()
    form, refusal = MaskForm.ADDITIVE, falls_back() and refusal_of_model(config)
    if refusal:
        warn_once(type(config).__name__, type(config).__name__, f"{refusal}; its own attention runs instead")
    else:
        form = mask_form(config)
    # A static cache has a tensor as offset, and slots past its end.
    filled = q_offset + (q_length - kv_offset)
    whole_padding = attention_mask is None or _covers(attention_mask, kv_offset, kv_length, filled)
    if attention_mask is not None and is_recurrent(config):
        hides = q_length > 1 and _padding_or_none(attention_mask, kv_offset, filled) is not None
        if hides or not whole_padding:
            form = MaskForm.ADDITIVE
    if whole_padding and form is not MaskForm.ADDITIVE:
        window = causal_window(mask_function)
        if form is MaskForm.PADDING and attention_mask is None and q_length == kv_length:
            packed = _packed(mask_function)
            if packed is not None:
                return packed
        # transformers forbids the skip for any single row over a static cache. Models that always need a bool
        # mask do not declare flash attention.
        wanted = allow_is_causal_skip or q_length == 1
        if window is not None and wanted and form is MaskForm.PADDING:
            padding = _padding_or_none(attention_mask, kv_offset, filled, may_wait=q_length > 1)
            aligned = not isinstance(filled, Tensor) and filled == kv_length
            if aligned and window >= kv_length and allow_is_causal_skip:
                return nothing_hidden(device, batch_size, kv_length) if padding is None else padding
            return write_pattern(batch_size, kv_length, filled, window, padding, device)
        elif mask_function is bidirectional_mask_function and allow_is_bidirectional_skip:
            padding = _padding_or_none(attention_mask, kv_offset, kv_length)
            if padding is None:
                return nothing_hidden(device, batch_size, 1, q_length, kv_length)
            return padding[:, None, None, :].expand(-1, -1, q_length, -1)
    build: Callable[..., Tensor] = eager_mask if form is MaskForm.ADDITIVE else sdpa_mask
    return build(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=False,
        device=device,
        **kwargs,
    )


def _covers(padding: Tensor, kv_offset: int, kv_length: int, filled: int | Tensor) -> bool:
    """Whether the padding covers every filled key and no absent one. `_padding_or_none` checks device
    lengths."""
    known = padding.shape[-1] - kv_offset
    if isinstance(filled, Tensor):
        return known <= kv_length
    return known == kv_length or filled <= known < kv_length


def _padding_or_none(
    padding: Tensor | None, kv_offset: int, filled: int | Tensor, may_wait: bool = True
) -> Tensor | None:
    """The padding of the filled keys, or None if it hides nothing. The check waits for the device, so a step
    of one token, where waiting costs more than reading a byte per key, keeps the mask. So does tracing."""
    if padding is None:
        return None
    if not may_wait:
        end = None if isinstance(filled, Tensor) else kv_offset + filled
        return padding[:, kv_offset:end]
    if isinstance(filled, Tensor):
        padding = padding[:, kv_offset:]
        hides_nothing = padding.all() & (filled <= padding.shape[-1])
    else:
        padding = padding[:, kv_offset : kv_offset + filled]
        hides_nothing = padding.all()
    return padding if is_tracing(padding) or not bool(hides_nothing) else None


def _packed(mask_function: Callable[..., Any]) -> Tensor | None:
    """The pattern of packed sequences, if the mask function is causal in each of them, with or without a
    window."""
    parts = None if torch.compiler.is_compiling() else packed_parts(mask_function)
    if parts is None:
        return None
    of_one, sequence_ids = parts
    window = causal_window(of_one)
    if window is None or is_tracing(sequence_ids):
        return None
    return write_packed(sequence_ids, window)


def causal_window(mask_function: Callable[..., Any]) -> int | None:
    """How many keys a row sees, itself included, if the mask function is one of transformers' own causal or
    sliding-window functions. None for any other."""
    if mask_function is causal_mask_function:
        return sys.maxsize
    if torch.compiler.is_compiling():  # the tracer cannot inspect functions
        return None
    parts = and_parts(mask_function)
    like = and_parts(sliding_window_causal_mask_function(1))
    if len(parts) != 2 or parts[1] is not causal_mask_function or not made_like(parts[0], like[0]):
        return None
    window = closed_over(parts[0], "sliding_window")
    return window if isinstance(window, int) and window >= 1 else None
