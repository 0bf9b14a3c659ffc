"""Hugging Face transformers: `register()`, then load a model with `attn_implementation="fattn"`.

Two functions meet here. transformers calls the *mask function* once per forward and layer pattern and hands
what it returns, unchanged, to the *attention function* of every layer. They agree on three forms:

    None        no padding; the layer's own causality decides (rows aligned to the newest key)
    2D bool     `[B, Lk]`, True = a real token; again the layer's causality decides
    4D          `[B or 1, H or 1, Lq or 1, Lk]`, bool or additive: the whole truth, causality included

Only the patterns that are plainly causal take a short form. Everything else (sliding windows, chunks, packed
sequences, static caches, prefix tuning) becomes the 4D mask that transformers builds for SDPA, and is handled
by the same kernels. Without a mask function of its own, an attention function would silently lose padding.

A row that sees no key gives 0 here, where eager attention gives the mean of all values: such rows are left
padding, and a model's output does not use them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .._ops import MAX_DECODE_ROWS

try:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask
    from transformers.utils.import_utils import is_tracing
except ImportError as error:
    raise ImportError(
        "torch_fattn.integrations.transformers needs transformers 5.17: "
        "pip install 'torch-fattn[transformers]'"
    ) from error

__all__ = ["NAME", "attend", "make_mask", "register"]

NAME = "fattn"

# Keyword arguments of some models' attention that change what is computed and that the operators cannot
# express.
_REFUSED_KWARGS = {
    "indices": "a sparse selection of keys",
    "block_indices": "a sparse selection of key blocks",
    "position_bias": "a learned position bias",
}
_PACKING_KWARGS = ("cu_seq_lens_q", "cu_seq_lens_k")


def register() -> None:
    """Make `attn_implementation="fattn"` known to transformers. May be called more than once."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, make_mask)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function: query `[B,Hq,Lq,D]`, key and value `[B,Hkv,Lk,..]` with any strides,
    attention_mask in one of the three forms above; returns `([B,Lq,Hq,Dv], None)`."""
    _refuse_what_is_not_built(attention_mask, dropout, kwargs)
    q_len, kv_len = query.shape[2], key.shape[2]
    mask_is_whole = attention_mask is not None and attention_mask.ndim == 4
    if sliding_window is not None and not mask_is_whole and kv_len > sliding_window:
        raise NotImplementedError(
            f"fattn attention: {kv_len} keys exceed the sliding window of {sliding_window} and no 4D mask "
            "came with them; build the mask with transformers' create_sliding_window_causal_mask"
        )
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    causal = is_causal and not mask_is_whole
    mask = attention_mask
    if mask is not None and mask.ndim == 2:
        mask = mask[:, None, None, :]

    options: dict[str, Any] = {"sinks": s_aux, "softcap": softcap or 0.0, "scale": scaling}
    # A single row sees every key whether or not it is causal.
    if q_len == 1 or (causal and q_len <= MAX_DECODE_ROWS):
        out, _lse = torch.ops.fattn.decode(query, key, value, attn_mask=mask, **options)
    else:
        out, _lse = torch.ops.fattn.prefill(query, key, value, mask, is_causal=causal, **options)
    return out.transpose(1, 2).contiguous(), None


def make_mask(
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **kwargs: Any,
) -> Tensor | None:
    """The mask function: the shortest of the three forms that says the same as `mask_function` and the
    padding."""
    whole_padding = attention_mask is None or attention_mask.shape[-1] == kv_offset + kv_length
    if whole_padding and allow_is_causal_skip and mask_function is causal_mask_function:
        # A static cache has a tensor as offset, and slots past its end that only a mask can hide.
        aligned = not isinstance(q_offset, Tensor) and q_offset + q_length == kv_offset + kv_length
        if aligned:
            return _padding_or_none(attention_mask, kv_length)
    if whole_padding and allow_is_bidirectional_skip and mask_function is bidirectional_mask_function:
        padding = _padding_or_none(attention_mask, kv_length)
        # 4D: the layer of a decoder that is used bidirectionally may still call itself causal.
        return None if padding is None else padding[:, None, None, :]
    return sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=False,
        **kwargs,
    )


def _padding_or_none(padding: Tensor | None, kv_length: int) -> Tensor | None:
    """The `[B, Lk]` padding of the keys that are present, or None where it hides nothing. Looking costs one
    wait for the device per forward; a graph that is being traced cannot look and keeps the mask."""
    if padding is None:
        return None
    padding = padding[:, -kv_length:]
    return padding if is_tracing(padding) or not bool(padding.all()) else None


def _refuse_what_is_not_built(mask: Tensor | None, dropout: float, kwargs: dict[str, Any]) -> None:
    for name, meaning in _REFUSED_KWARGS.items():
        if kwargs.get(name) is not None:
            raise NotImplementedError(
                f"fattn attention: {name} ({meaning}) is not built; use attn_implementation='sdpa' or 'eager'"
            )
    for name in _PACKING_KWARGS:
        if kwargs.get(name) is not None and (mask is None or mask.ndim != 4):
            raise NotImplementedError(
                f"fattn attention: {name} (packed sequences) is not built; pass position_ids that restart at "
                "every sequence and no attention_mask, so that transformers builds a 4D mask"
            )
    if dropout > 0:
        raise NotImplementedError(
            f"fattn attention: dropout {dropout} is not built; call model.eval() or set the dropout to 0"
        )
    if kwargs.get("output_attentions"):
        warnings.warn(
            "fattn attention does not return attention weights; use attn_implementation='eager' for them",
            stacklevel=3,
        )
