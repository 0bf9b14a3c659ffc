"""The attention function: from what a layer passes to one call of an operator, or to a refusal."""

from __future__ import annotations

import warnings
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from .masks import hides_nothing
from .patterns import SHORT_QUERY, is_pattern, read_pattern
from .support import USE_ANOTHER, USE_EAGER

# Keywords that change what is computed and that the operators cannot express, and what to do about each.
_UNBUILT = {
    "head_mask": ("a mask of whole heads", USE_EAGER),
    "position_bias": ("a learned position bias", USE_ANOTHER),
    "indices": ("a sparse selection of keys", USE_ANOTHER),
    "block_indices": ("a sparse selection of key blocks", USE_ANOTHER),
}
# Packed sequences: their boundaries are in a 4D mask, or nowhere that the operators could see.
_PACKING = frozenset({"cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens_q", "cu_seqlens_k", "seq_idx"})
# What models of transformers 5.17 pass along on the way through and attention does not need.
_HARMLESS = frozenset(
    {
        "cache_position",
        "deterministic",
        "labels",
        "logits_to_keep",
        "max_length_k",
        "max_length_q",
        "max_seqlen_k",
        "max_seqlen_q",
        "num_items_in_batch",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)


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
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query `[B,Hq,Lq,D]`, key and value `[B,Hkv,Lk,..]` with any strides; attention_mask in one of the forms
    of `masks`, or None from a model that asked for no mask: then `is_causal`, or the layer's attribute of
    that name, decides. `s_aux [Hq]`: the learned sinks. Returns `([B,Lq,Hq,Dv], None)`.

    Raises NotImplementedError, ValueError or TypeError before anything is computed. A keyword that is not
    known to be harmless is refused unless it is None or False.
    """
    refuse_training(module, query, key, value)
    if dropout > 0 and module.training:
        refuse(module, f"dropout {dropout} is not built", "call model.eval() or set the dropout to 0")
    _refuse_shapes(module, query, key, value, attention_mask)
    refuse_keywords(module, attention_mask, kwargs)
    q_len, kv_len = query.shape[2], key.shape[2]
    mask_is_whole = attention_mask is not None and attention_mask.ndim == 4
    if sliding_window is not None and not mask_is_whole and kv_len > sliding_window:
        refuse(
            module,
            f"{kv_len} keys exceed the sliding window of {sliding_window} and no 4D mask came with them",
            "build the mask with transformers' create_sliding_window_causal_mask",
        )
    causal = attention_mask is not None and not mask_is_whole
    if attention_mask is None and q_len > 1:
        causal = _causal_without_mask(module, is_causal, q_len, kv_len)
    mask = attention_mask
    if mask is not None and hides_nothing(mask):
        mask = None
    elif mask is not None and mask.ndim == 2:
        mask = mask[:, None, None, :]

    options: dict[str, Any] = {"scale": scaling, "softcap": softcap or 0.0, "sinks": s_aux}
    seq_lens = None
    if mask is not None and is_pattern(mask):
        pattern = read_pattern(mask, q_len, kv_len)
        if pattern is None:
            _refuse_pattern(module, mask, q_len, kv_len)
        causal, seq_lens, mask = True, pattern.seq_lens, pattern.padding
        key, value = key[:, :, : pattern.keys], value[:, :, : pattern.keys]
        options["window_left"] = pattern.window_left
    try:
        # A single row sees every key whether or not it is causal.
        if q_len == 1 or (causal and q_len <= SHORT_QUERY):
            out, _lse = torch.ops.fattn.decode(query, key, value, seq_lens, attn_mask=mask, **options)
        else:
            out, _lse = torch.ops.fattn.prefill(query, key, value, mask, is_causal=causal, **options)
    except (NotImplementedError, TypeError, ValueError) as refusal:
        raise refusal_of_operator(module, refusal) from refusal
    if out.requires_grad and not torch.compiler.is_compiling():
        out.register_hook(_refuse_backward)
    return out.transpose(1, 2).contiguous(), None


def refusal_of_operator(module: nn.Module, refusal: Exception, advice: str = USE_ANOTHER) -> Exception:
    """The operator's own advice is for who calls it directly."""
    what, _, _advice = str(refusal).splitlines()[0].partition("; ")
    return type(refusal)(f"{_who(module)}: {what}; {advice}")


def _who(module: nn.Module) -> str:
    return f"fattn attention in {type(module).__name__}"


def refuse(module: nn.Module, what: str, advice: str) -> NoReturn:
    raise NotImplementedError(f"{_who(module)}: {what}; {advice}")


def refuse_training(module: nn.Module, *inputs: Tensor) -> None:
    """The line is training mode *and* inputs that require gradients *and* gradients enabled: someone is about
    to call backward. `model(ids)` after eval(), without no_grad, has the last two as well and goes on."""
    if module.training and torch.is_grad_enabled() and any(t.requires_grad for t in inputs):
        refuse(
            module,
            "the model is in training mode with gradients enabled, and the kernels have no backward",
            'train with attn_implementation="sdpa", or infer after model.eval() or under torch.no_grad()',
        )


def _refuse_backward(_grad: Tensor) -> NoReturn:
    raise RuntimeError(
        'fattn attention: backward is not built; train with attn_implementation="sdpa" or "eager"'
    )


def _refuse_shapes(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> None:
    if not query.ndim == key.ndim == value.ndim == 4:
        shapes = ", ".join(str(tuple(t.shape)) for t in (query, key, value))
        refuse(module, f"query, key and value are not all [B, H, L, D] but {shapes}", USE_ANOTHER)
    if mask is None:
        return
    batch, kv_len = query.shape[0], key.shape[2]
    if mask.ndim == 2 and (mask.dtype is not torch.bool or mask.shape != (batch, kv_len)):
        refuse(
            module,
            f"the 2D mask is {mask.dtype} {tuple(mask.shape)} and must be bool {(batch, kv_len)}",
            USE_ANOTHER,
        )
    if mask.ndim not in (2, 4):
        refuse(
            module, f"a mask of {mask.ndim} dimensions is neither padding nor [B, H, Lq, Lk]", USE_ANOTHER
        )
    if mask.dtype is not torch.bool and not mask.is_floating_point() and not is_pattern(mask):
        refuse(module, f"a mask of {mask.dtype} is neither bool nor added to the scores", USE_ANOTHER)


def _refuse_pattern(module: nn.Module, mask: Tensor, q_len: int, kv_len: int) -> NoReturn:
    refuse(
        module,
        f"the causal pattern {tuple(mask.shape)} is not about {q_len} rows and {kv_len} keys",
        USE_ANOTHER,
    )


def refuse_keywords(module: nn.Module, mask: Tensor | None, kwargs: dict[str, Any]) -> None:
    for name, value in kwargs.items():
        if value is None or value is False or name in _HARMLESS:
            continue
        if name in _UNBUILT:
            meaning, advice = _UNBUILT[name]
            refuse(module, f"{name} ({meaning}) is not built", advice)
        if name in _PACKING:
            if mask is None or mask.ndim != 4:
                refuse(
                    module,
                    f"{name} (packed sequences) is not built",
                    "pass position_ids that restart at every sequence and no attention_mask, so that "
                    "transformers builds a 4D mask",
                )
            continue
        refuse(module, f"the keyword {name} is unknown and may change what attention means", USE_ANOTHER)
    if kwargs.get("output_attentions"):
        warnings.warn(
            'fattn attention does not return attention weights; use attn_implementation="eager" for them',
            stacklevel=3,
        )


def _causal_without_mask(module: nn.Module, is_causal: bool | None, q_len: int, kv_len: int) -> bool:
    """Without a mask someone else must say whether the layer is causal; transformers' sdpa function would
    take a silent layer for causal, eager attention for bidirectional."""
    if is_causal is None:
        is_causal = getattr(module, "is_causal", None)
    if is_causal is None:
        refuse(module, "neither a mask nor is_causal says whether the layer is causal", USE_EAGER)
    if is_causal and q_len > kv_len:
        refuse(module, f"{q_len} causal query rows over {kv_len} keys have no alignment", USE_EAGER)
    return bool(is_causal)
