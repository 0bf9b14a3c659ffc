"""The attention function: runs a layer's call on an operator or another attention function, or refuses it."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from ...runtime.signatures import public
from .call import Call
from .fusion.deferred import plain
from .operators import compute, compute_packed
from .packing import lengths_of, refuse_mixing, restarts_of
from .paged import attend_over_cache
from .paged_cache import Stored, attend_stored
from .selected import attend_selected, take_selection, whole_mask, with_mask_of
from .support import USE_ANOTHER, USE_EAGER
from .unsupported import (
    MeaningRefusedError,
    falls_back,
    reason_of,
    refusal_of_operator,
    refuse,
    refuse_keywords,
    refuse_meaning,
    refuse_training,
    run_fallback,
)
from .visibility import LayerMask, Lengths, is_packed, is_pattern, read

_PASS_BOOL = "pass a bool mask, or one that is added to the scores"


@public("torch_fattn.integrations.transformers.attend", ahead=False)
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
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    cache: Any = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of query `[B,Hq,Lq,D]` over key and value `[B,Hkv,Lk,..]`, with any strides. attention_mask
    has one of the forms of `masks`; it is None if the model did not request a mask; then `is_causal`, or the
    layer's attribute of that name, applies. `s_aux [Hq]` are the learned sinks; `position_bias`,
    broadcastable to `[B,Hq,Lq,Lk]`, is added to the scores (T5); `cu_seq_lens_q` and `cu_seq_lens_k` cut
    packed sequences. Returns `([B,Lq,Hq,Dv], None)`.

    Gradients are those of `torch_fattn.attention`. Calls that it cannot differentiate (dropout, a mask or
    bias that requires grad, head dims above 256) run transformers' sdpa attention. Unsupported layers run it
    too under `register(on_unsupported="sdpa")`; otherwise they raise NotImplementedError, ValueError or
    TypeError before anything is computed. An unknown keyword is refused unless it is None or False.
    """
    is_stored = isinstance(key, Stored) and isinstance(value, Stored)
    is_batched = cache is not None or "write_index" in kwargs  # passed by transformers after 5.17
    mask = None
    if not is_stored:
        query, key, value = plain(query), plain(key), plain(value)
    if not is_stored and not is_batched:
        mask, key, value = _meaning(module, query, key, value, attention_mask, sliding_window)
    of_layer = dropout, scaling, sliding_window, softcap, s_aux, is_causal
    call = Call(module, query, key, value, mask, *of_layer, position_bias, kwargs)
    if is_stored:
        return attend_stored(call, attention_mask), None
    if is_batched:
        return attend_over_cache(call, attention_mask, cache)
    restarts = None
    if mask is not None and mask.packed is None:
        # In an encoder, positions may restart for other reasons.
        if mask.is_causal or getattr(module, "is_causal", False):
            restarts = restarts_of(kwargs.get("position_ids"), query, key.shape[2])
    call, selected = take_selection(call)
    if selected is not None:
        if restarts is not None:
            refuse_mixing(call, restarts.cu_seqlens_q)
        whole = whole_mask(call)
        sparse = attend_selected(call, whole, selected)
        if sparse is not None:
            return sparse, None
        call = with_mask_of(call, whole, selected)
    _refuse_bias(call)
    lengths = lengths_of(call, restarts)
    _refuse_what_no_mask_has(call, lengths)
    if why := call.why_not_trained():
        out = run_fallback(call, why, lengths)
        return refuse_training(module, why) if out is None else out
    try:
        return _attend(call, lengths), None
    except MeaningRefusedError:
        raise
    except (NotImplementedError, TypeError, ValueError) as refusal:
        if not falls_back():
            raise
        out = run_fallback(call, reason_of(refusal), lengths)
        if out is None:
            raise
        return out


@public("torch_fattn.integrations.transformers.attend_paged", ahead=False)
@functools.wraps(attend, assigned=(), updated=())  # its signature
def attend_paged(module: nn.Module, *arguments: Any, **keywords: Any) -> tuple[Tensor, None]:
    """`attend` of continuous batching only: query `[1,Hq,T,D]`, key and value `[1,Hkv,T,..]` of the new
    tokens. Returns `([1,T,Hq,Dv], None)`."""
    if keywords.get("cache") is None and "write_index" not in keywords:
        refuse(module, "there is no cache of continuous batching", 'use attn_implementation="fattn"')
    return attend(module, *arguments, **keywords)


def _attend(call: Call, lengths: Lengths | None) -> Tensor:
    mask, options = call.mask, call.options
    query, key, value = call.query, call.key, call.value
    causal = mask is not None and mask.is_causal
    if mask is None and (call.rows > 1 or lengths is not None):
        causal = _causal_without_mask(call)
    try:
        if call.position_bias is not None:
            whole = None
            if mask is not None:
                whole, causal = mask.dense()
            biased = call.position_bias if whole is None else _with_bias(whole, call.position_bias)
            return compute(query, key, value, biased, None, causal=causal, **options)
        if mask is not None and mask.packed is not None:
            lengths = mask.packed
        if lengths is not None:
            window = call.window_left
            options |= {"is_causal": causal, "window_left": window, "window_right": window}
            return compute_packed(query, key, value, lengths, **options)
        if mask is None:
            return compute(query, key, value, None, None, causal=causal, **options)
        if mask.filled < call.keys:
            key, value = key[:, :, : mask.filled], value[:, :, : mask.filled]
        if mask.has_pattern:  # otherwise the keys fit the layer's window
            options["window_left"] = mask.window_left
        hidden = mask.padding if mask.whole is None else mask.whole
        return compute(query, key, value, hidden, mask.seq_lens, causal=causal, **options)
    except (NotImplementedError, TypeError, ValueError) as refusal:
        raise refusal_of_operator(call.module, refusal) from refusal


def _meaning(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, sliding_window: int | None
) -> tuple[LayerMask | None, Tensor, Tensor]:
    """The decoded mask, and its keys and values. In 5.17, the cache of a draft model with a sliding window
    returns older ones too. Refuses shapes that transformers' layers never pass."""
    if not query.ndim == key.ndim == value.ndim == 4:
        shapes = ", ".join(str(tuple(t.shape)) for t in (query, key, value))
        refuse_meaning(module, f"query, key and value are not all [B, H, L, D] but {shapes}", USE_ANOTHER)
    if mask is None:
        return None, key, value
    if not isinstance(mask, Tensor):
        refuse_meaning(module, f"attention_mask is of type {type(mask).__name__}", "pass a tensor or None")
    if mask.ndim not in (2, 4):
        refuse_meaning(
            module, f"a mask of {mask.ndim} dimensions is neither padding nor [B, H, Lq, Lk]", USE_ANOTHER
        )
    batch, rows, ours = query.shape[0], query.shape[2], is_pattern(mask)
    if sliding_window is not None and not ours:
        newest = sliding_window - 1 + rows
        if mask.shape[-1] == newest < key.shape[2]:
            key, value = key[:, :, -newest:], value[:, :, -newest:]
    keys = key.shape[2]
    if mask.ndim == 2 and (mask.dtype is not torch.bool or mask.shape != (batch, keys)):
        refuse_meaning(
            module,
            f"the 2D mask is {mask.dtype} {tuple(mask.shape)} and must be bool {(batch, keys)}",
            USE_ANOTHER,
        )
    if ours and is_packed(mask) and rows <= 2:  # packed sequences have more rows
        ours = False
    if mask.dtype is not torch.bool and not mask.is_floating_point() and not ours:
        refuse_meaning(module, f"a mask of {mask.dtype} is neither bool nor added to the scores", _PASS_BOOL)
    if not ours and mask.shape[-1] not in (1, keys):
        refuse_meaning(
            module,
            f"the mask has {mask.shape[3]} keys and the layer {keys}",
            "pass a mask of its keys, in a dict by layer type if the layers differ",
        )
    meaning = read(mask, rows, keys)
    if meaning is None:
        lengths = f"{rows} rows and {keys} keys"
        refuse_meaning(
            module, f"the {mask.dtype} mask {tuple(mask.shape)} is not a pattern of {lengths}", _PASS_BOOL
        )
    return meaning, key, value


def _refuse_what_no_mask_has(call: Call, lengths: Lengths | None) -> None:
    """Refuses keywords and windows that would be ignored both here and by another attention function."""
    has_pattern = call.mask is not None and call.mask.has_pattern
    refuse_keywords(call.module, call.keywords, separates=has_pattern or lengths is not None)
    window = call.sliding_window
    if window is not None and not has_pattern and lengths is None and call.keys > window:
        refuse_meaning(
            call.module,
            f"{call.keys} keys exceed the sliding window of {window} and no 4D mask came with them",
            "build the mask with transformers' create_sliding_window_causal_mask",
        )


def _with_bias(mask: Tensor, bias: Tensor) -> Tensor:
    """The sum of both as an additive mask."""
    return torch.where(mask, bias, -torch.inf) if mask.dtype is torch.bool else bias + mask


def _refuse_bias(call: Call) -> None:
    bias = call.position_bias
    if bias is None:
        return
    whole = (*call.query.shape[:3], call.keys)
    fits = bias.ndim == 4 and all(n in (1, m) for n, m in zip(bias.shape, whole, strict=True))
    if not fits or not bias.is_floating_point():
        refuse_meaning(
            call.module,
            f"position_bias is {bias.dtype} {tuple(bias.shape)} and not numbers for {whole}",
            USE_ANOTHER,
        )
    if call.softcap:
        refuse_meaning(
            call.module, f"position_bias with a soft cap of {call.softcap} is not implemented", USE_ANOTHER
        )


def _causal_without_mask(call: Call) -> bool:
    """Whether a layer without a mask is causal, from the keyword or the layer's attribute. Refused if both
    are missing: transformers' sdpa function would make it causal, eager attention bidirectional."""
    is_causal = getattr(call.module, "is_causal", None) if call.is_causal is None else call.is_causal
    if is_causal is None:
        refuse(call.module, "neither a mask nor is_causal says whether the layer is causal", USE_EAGER)
    if is_causal and call.rows > call.keys:
        refuse(
            call.module, f"{call.rows} causal query rows over {call.keys} keys have no alignment", USE_EAGER
        )
    return bool(is_causal)
