"""The mask function: says a layer pattern and the padding in the shortest form that its model can take.

    2D bool  `[B, Lk]`, True = a real token: the pattern is causal, rows aligned to the newest key
    4D       `[B or 1, H or 1, Lq or 1, Lk]`, bool or additive: the whole truth, causality included

Whichever it is, it says the pattern: whether a layer calls itself causal no longer matters, as it does not
under eager attention. `None` says nothing and is never returned; a mask that hides no key is a single True,
expanded, which the attention function recognises by its strides and does not read.

Only the patterns that are plainly causal take the 2D form, and only for models that declare flash attention
and so expect it. Everything else (sliding windows, chunks, packed sequences, static caches, prefix tuning) is
the 4D mask that transformers builds for its own implementations. Recurrent models get their padding as
additive 4D masks, which hide by a finite number: a row that sees no key is then the mean of all values, as
under eager attention, and reaches later tokens through the state. Without a mask function of its own, an
attention function would silently lose padding.
"""

from __future__ import annotations

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
)
from transformers.utils.import_utils import is_tracing

from .support import MaskForm, is_recurrent, mask_form


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
    """Called by transformers' `create_*_mask` with keywords only. Raises NotImplementedError for a model that
    does not go through the attention interface."""
    form = mask_form(config)
    whole_padding = attention_mask is None or attention_mask.shape[-1] == kv_offset + kv_length
    if attention_mask is not None and is_recurrent(config):
        if not whole_padding or _padding_or_none(attention_mask, kv_length) is not None:
            form = MaskForm.ADDITIVE
    if whole_padding and form is not MaskForm.ADDITIVE:
        # A static cache has a tensor as offset, and slots past its end that only a mask can hide.
        aligned = not isinstance(q_offset, Tensor) and q_offset + q_length == kv_offset + kv_length
        if mask_function is causal_mask_function and allow_is_causal_skip and aligned:
            if form is MaskForm.PADDING:
                padding = _padding_or_none(attention_mask, kv_length)
                return _nothing_hidden(device, batch_size, kv_length) if padding is None else padding
        elif mask_function is bidirectional_mask_function and allow_is_bidirectional_skip:
            padding = _padding_or_none(attention_mask, kv_length)
            if padding is None:
                return _nothing_hidden(device, batch_size, 1, q_length, kv_length)
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


def hides_nothing(mask: Tensor) -> bool:
    """Whether this is the expanded True of `_nothing_hidden`; known without a look at the device's memory. An
    expanded False would leave no row a key, which no model means."""
    return mask.dtype is torch.bool and not any(mask.stride())


def _nothing_hidden(device: torch.device | str, *shape: int) -> Tensor:
    return torch.ones((), dtype=torch.bool, device=device).expand(shape)


def _padding_or_none(padding: Tensor | None, kv_length: int) -> Tensor | None:
    """The `[B, Lk]` padding of the keys that are present, or None where it hides nothing. Looking costs one
    wait for the device per forward; a graph that is being traced cannot look and keeps the mask."""
    if padding is None:
        return None
    padding = padding[:, -kv_length:]
    return padding if is_tracing(padding) or not bool(padding.all()) else None
