"""The attention function: turns the arguments of a layer into a call of an operator, of another attention
function, or a refusal."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ...runtime.signatures import public
from .fallback import run_fallback, without_patterns
from .masks import hides_nothing
from .operators import compute
from .packed import begins_of, compute_packed, compute_pattern, lengths_of
from .paged import attend_paged
from .paged_cache import Stored
from .patterns import is_packed, is_pattern, read_pattern
from .policy import falls_back
from .positions import Restarts, restarts_of, see_one_another
from .refusals import (
    MeaningRefusedError,
    reason_of,
    refusal_of_operator,
    refuse,
    refuse_keywords,
    refuse_meaning,
    refuse_training,
    why_not_trained,
)
from .selected import compute_selected, mask_of_selected, reads_selected, take_selection, whole_mask
from .stored_attention import attend_stored
from .support import USE_ANOTHER, USE_EAGER

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
    has one of the forms of `masks`; it is None if the model requested no mask, and then `is_causal`, or the
    layer's attribute of that name, decides. `s_aux [Hq]` are the learned sinks; `position_bias`,
    broadcastable to `[B,Hq,Lq,Lk]`, is added to the scores (T5); `cu_seq_lens_q` and `cu_seq_lens_k` cut
    packed sequences. Returns `([B,Lq,Hq,Dv], None)`.

    Gradients are those of `torch_fattn.attention`. What it cannot train (dropout, a mask or bias that
    requires grad, heads above 256) runs transformers' sdpa attention. Unsupported layers run it too under
    `register(on_unsupported="sdpa")`; otherwise they raise NotImplementedError, ValueError or TypeError
    before anything is computed. An unknown keyword is refused unless it is None or False.
    """
    of_layer: dict[str, Any] = {"softcap": softcap, "s_aux": s_aux}
    of_call: dict[str, Any] = {
        "dropout": dropout,
        "scaling": scaling,
        "sliding_window": sliding_window,
        "is_causal": is_causal,
        "position_bias": position_bias,
        **kwargs,
    }
    if isinstance(key, Stored) and isinstance(value, Stored):
        return attend_stored(module, query, key, value, attention_mask, **of_layer, **of_call), None
    if cache is not None or "write_index" in kwargs:  # continuous batching of transformers after 5.17
        return attend_paged(module, query, key, value, attention_mask, cache=cache, **of_layer, **of_call)
    key, value = _newest(query, key, value, attention_mask, sliding_window)
    _refuse_shapes(module, query, key, value, attention_mask)
    restarts = None
    if attention_mask is not None and not is_packed(attention_mask):
        # Positions of an encoder may restart for other reasons.
        if not _is_whole(attention_mask) or getattr(module, "is_causal", False):
            restarts = restarts_of(kwargs.get("position_ids"), query, key.shape[2])
    if (selected := take_selection(module, of_call, key.shape[2])) is not None:
        if restarts is not None:
            _refuse_packing(module, attention_mask, restarts.begins, kwargs.get("use_cache"))
        attention_mask = whole_mask(attention_mask, query.shape[2], key.shape[2])
        sparse = _attend_selected(module, query, key, value, attention_mask, selected, **of_layer, **of_call)
        if sparse is not None:
            return sparse, None
        attention_mask = mask_of_selected(attention_mask, selected, query, key)
    lengths = _packing(module, query, key, value, attention_mask, restarts, softcap=softcap, **of_call)
    packed = None if lengths is None else lengths[:2]
    if why := why_not_trained(module, query, key, value, attention_mask, position_bias, dropout=dropout):
        out = run_fallback(module, query, key, value, attention_mask, why, packed, **of_layer, **of_call)
        return refuse_training(module, why) if out is None else out
    try:
        return _attend(module, query, key, value, attention_mask, lengths, **of_layer, **of_call), None
    except MeaningRefusedError:
        raise
    except (NotImplementedError, TypeError, ValueError) as refusal:
        if not falls_back():
            raise
        why = reason_of(refusal)
        out = run_fallback(module, query, key, value, attention_mask, why, packed, **of_layer, **of_call)
        if out is None:
            raise
        return out


def _attend_selected(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    selected: Tensor,
    *,
    softcap: float | None,
    s_aux: Tensor | None,
    scaling: float | None,
    dropout: float,
    sliding_window: int | None,
    is_causal: bool | None,
    position_bias: Tensor | None,
    **kwargs: Any,
) -> Tensor | None:
    """Attention that reads the selected keys only; None if a mask is better, or alone can do it."""
    if sliding_window is not None or position_bias is not None or (module.training and dropout > 0):
        return None
    if not reads_selected(query, key, value, mask, selected, s_aux):
        return None
    refuse_keywords(module, mask, kwargs)
    options: dict[str, Any] = {"scale": scaling, "softcap": softcap or 0.0, "sinks": s_aux}
    try:
        return compute_selected(query, key, value, mask, selected, **options)
    except (NotImplementedError, TypeError, ValueError) as refusal:
        if not falls_back():
            raise refusal_of_operator(module, refusal) from refusal
        return None


def _packing(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    restarts: Restarts | None,
    *,
    sliding_window: int | None,
    softcap: float | None,
    position_bias: Tensor | None,
    is_causal: bool | None,
    dropout: float,
    scaling: float | None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor, int, int] | None:
    """The lengths of packed sequences, if they decide which keys a row sees. Refuses arguments that neither
    the kernels nor another attention function supports."""
    _refuse_bias(module, query, key, position_bias, softcap)
    q_len, kv_len = query.shape[2], key.shape[2]
    lengths = None
    if position_bias is None and _leaves_packing_open(mask, q_len, kv_len):
        lengths = lengths_of(kwargs, query)
        if lengths is None and restarts is not None and not kwargs.get("use_cache"):
            lengths = restarts.lengths
    if lengths is None:
        begins = begins_of(kwargs, query) if restarts is None else restarts.begins
        if begins is not None:
            _refuse_packing(module, mask, begins, kwargs.get("use_cache"))
    refuse_keywords(module, mask, kwargs, packed=lengths is not None)
    mask_is_whole = mask is not None and mask.ndim == 4
    if sliding_window is not None and not mask_is_whole and lengths is None and kv_len > sliding_window:
        refuse_meaning(
            module,
            f"{kv_len} keys exceed the sliding window of {sliding_window} and no 4D mask came with them",
            "build the mask with transformers' create_sliding_window_causal_mask",
        )
    return lengths


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    lengths: tuple[Tensor, Tensor, int, int] | None,
    *,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
    s_aux: Tensor | None,
    is_causal: bool | None,
    position_bias: Tensor | None,
    **kwargs: Any,
) -> Tensor:
    q_len, kv_len = query.shape[2], key.shape[2]
    mask_is_whole = attention_mask is not None and attention_mask.ndim == 4
    causal = attention_mask is not None and not mask_is_whole
    if attention_mask is None and (q_len > 1 or lengths is not None):
        causal = _causal_without_mask(module, is_causal, q_len, kv_len)
    mask = attention_mask
    if position_bias is not None:
        if mask is not None and (mask.ndim == 2 or is_pattern(mask)):
            mask, causal = without_patterns(mask, q_len, kv_len)
        elif mask is not None and hides_nothing(mask):
            mask = None
        mask = position_bias if mask is None else _with_bias(mask, position_bias)
    elif mask is not None and hides_nothing(mask):
        mask = None
    elif mask is not None and mask.ndim == 2:
        mask = mask[:, None, None, :]

    options: dict[str, Any] = {"scale": scaling, "softcap": softcap or 0.0, "sinks": s_aux}
    try:
        if lengths is not None:
            window = -1 if sliding_window is None or mask_is_whole else sliding_window - 1
            if mask is not None:
                causal, window = True, read_pattern(mask, q_len, kv_len).window_left  # type: ignore[union-attr]
            options |= {"is_causal": causal, "window_left": window, "window_right": window}
            out = compute_packed(query, key, value, *lengths, **options)
        elif mask is not None and is_packed(mask):
            out = compute_pattern(query, key, value, mask, **options)
        else:
            seq_lens = None
            if mask is not None and is_pattern(mask):
                pattern = read_pattern(mask, q_len, kv_len)
                if pattern is None:
                    _refuse_pattern(module, mask, q_len, kv_len)
                causal, seq_lens, mask = True, pattern.seq_lens, pattern.padding
                key, value = key[:, :, : pattern.keys], value[:, :, : pattern.keys]
                options["window_left"] = pattern.window_left
            out = compute(query, key, value, mask, seq_lens, causal=causal, **options)
    except MeaningRefusedError:
        raise
    except (NotImplementedError, TypeError, ValueError) as refusal:
        raise refusal_of_operator(module, refusal) from refusal
    return out


def _is_whole(mask: Tensor) -> bool:
    return mask.ndim == 4 and not is_pattern(mask)


def _leaves_packing_open(mask: Tensor | None, q_len: int, kv_len: int) -> bool:
    """Whether a mask hides nothing or is only causal, perhaps with a window, so that the lengths of packed
    sequences decide where they are cut."""
    if mask is None or not is_pattern(mask):
        return mask is None or (hides_nothing(mask) and (mask.ndim == 2 or q_len == kv_len))
    pattern = None if is_packed(mask) else read_pattern(mask, q_len, kv_len)
    return pattern is not None and pattern.padding is None and q_len == kv_len


def _newest(
    query: Tensor, key: Tensor, value: Tensor, mask: Any, sliding_window: int | None
) -> tuple[Tensor, Tensor]:
    """The keys of the mask of a sliding layer. The cache of a draft model in 5.17 returns older ones, too."""
    fits = query.ndim == key.ndim == 4  # else they are refused
    if sliding_window is None or not isinstance(mask, Tensor) or is_pattern(mask) or not fits:
        return key, value
    newest = sliding_window - 1 + query.shape[2]
    if mask.ndim == 0 or mask.shape[-1] != newest or key.shape[2] <= newest:
        return key, value
    return key[:, :, -newest:], value[:, :, -newest:]


def _refuse_packing(module: nn.Module, mask: Tensor | None, begins: Tensor, cached: Any) -> None:
    """Refuses sequences that are packed into a row, if the mask lets them see one another."""
    rows = begins.shape[1]
    if mask is None:
        return
    if _is_whole(mask):
        if not see_one_another(mask, begins):
            return
        advice = "pass a 4D attention_mask that separates them"
    elif _leaves_packing_open(mask, rows, rows):
        advice = "pass use_cache=False" if cached else "pass each in a row of its own"
    else:
        return
    refuse_meaning(module, "the sequences that are packed into a row would see one another", advice)


def _with_bias(mask: Tensor, bias: Tensor) -> Tensor:
    """The sum of both as an additive mask."""
    return torch.where(mask, bias, -torch.inf) if mask.dtype is torch.bool else bias + mask


def _refuse_shapes(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> None:
    if not query.ndim == key.ndim == value.ndim == 4:
        shapes = ", ".join(str(tuple(t.shape)) for t in (query, key, value))
        refuse_meaning(module, f"query, key and value are not all [B, H, L, D] but {shapes}", USE_ANOTHER)
    if mask is None:
        return
    if not isinstance(mask, Tensor):
        refuse_meaning(module, f"attention_mask is of type {type(mask).__name__}", "pass a tensor or None")
    batch, kv_len = query.shape[0], key.shape[2]
    if mask.ndim == 2 and (mask.dtype is not torch.bool or mask.shape != (batch, kv_len)):
        refuse_meaning(
            module,
            f"the 2D mask is {mask.dtype} {tuple(mask.shape)} and must be bool {(batch, kv_len)}",
            USE_ANOTHER,
        )
    if mask.ndim not in (2, 4):
        refuse_meaning(
            module, f"a mask of {mask.ndim} dimensions is neither padding nor [B, H, Lq, Lk]", USE_ANOTHER
        )
    # Packed sequences have more than two rows.
    is_ours = is_pattern(mask) and (query.shape[2] > 2 or not is_packed(mask))
    if mask.dtype is not torch.bool and not mask.is_floating_point() and not is_ours:
        refuse_meaning(module, f"a mask of {mask.dtype} is neither bool nor added to the scores", _PASS_BOOL)
    if _is_whole(mask) and mask.shape[3] not in (1, kv_len):
        refuse_meaning(
            module,
            f"the mask has {mask.shape[3]} keys and the layer {kv_len}",
            "pass a mask of its keys, in a dict by layer type if the layers differ",
        )


def _refuse_bias(
    module: nn.Module, query: Tensor, key: Tensor, bias: Tensor | None, softcap: float | None
) -> None:
    if bias is None:
        return
    whole = (*query.shape[:3], key.shape[2])
    fits = bias.ndim == 4 and all(n in (1, m) for n, m in zip(bias.shape, whole, strict=True))
    if not fits or not bias.is_floating_point():
        refuse_meaning(
            module,
            f"position_bias is {bias.dtype} {tuple(bias.shape)} and not numbers for {whole}",
            USE_ANOTHER,
        )
    if softcap:
        refuse_meaning(module, f"position_bias with a soft cap of {softcap} is not implemented", USE_ANOTHER)


def _refuse_pattern(module: nn.Module, mask: Tensor, q_len: int, kv_len: int) -> NoReturn:
    refuse_meaning(
        module,
        f"the {mask.dtype} mask {tuple(mask.shape)} is not a pattern of {q_len} rows and {kv_len} keys",
        _PASS_BOOL,
    )


def _causal_without_mask(module: nn.Module, is_causal: bool | None, q_len: int, kv_len: int) -> bool:
    """Whether a layer without a mask is causal. If neither the keyword nor the layer decides, it is refused:
    transformers' sdpa function would make it causal, eager attention bidirectional."""
    if is_causal is None:
        is_causal = getattr(module, "is_causal", None)
    if is_causal is None:
        refuse(module, "neither a mask nor is_causal says whether the layer is causal", USE_EAGER)
    if is_causal and q_len > kv_len:
        refuse(module, f"{q_len} causal query rows over {kv_len} keys have no alignment", USE_EAGER)
    return bool(is_causal)
