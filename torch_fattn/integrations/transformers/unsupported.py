"""Unsupported layers and models: the policy of `register(on_unsupported=...)`, refusals, and the attention
that runs instead: transformers' sdpa function, with the mask that sdpa gets.

sdpa silently drops soft caps and learned sinks, so a layer with either runs its model's own eager function.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any, Literal, NoReturn, get_args

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ...runtime.signatures import shown
from ...runtime.warn import warn
from .call import Call
from .support import USE_ANOTHER, USE_EAGER
from .visibility import Lengths, causal_mask

OnUnsupported = Literal["error", "sdpa"]

_chosen: OnUnsupported = "error"
_warned: set[tuple[str, str]] = set()


def choose(on_unsupported: OnUnsupported) -> None:
    """Sets the policy and resets the warnings."""
    global _chosen
    if not isinstance(on_unsupported, str) or on_unsupported not in get_args(OnUnsupported):
        raise ValueError(
            f"torch_fattn.integrations.transformers.register: on_unsupported is {shown(on_unsupported)}; "
            'pass "error" or "sdpa"'
        )
    _chosen = on_unsupported
    _warned.clear()


def falls_back() -> bool:
    return _chosen == "sdpa"


def warn_once(who: str, where: str, why: str) -> None:
    """Warns once per kind of layer and reason, ignoring numbers and the operator's name in the reason. Silent
    during tracing, which cannot count."""
    if torch.compiler.is_compiling():
        return
    kind = (who, re.sub(r"\d+", "#", re.sub(r"^fattn\.\w+: ", "", why)))
    if kind not in _warned:
        _warned.add(kind)
        warn(f"fattn attention in {where}: {why}")


# Keywords that change the result and that the operators cannot express, with advice for each.
_UNBUILT = {
    "head_mask": ("a mask of whole heads", USE_EAGER),
    "position_bias": ("a position bias over the cache of continuous batching", USE_ANOTHER),
    "indices": ("a sparse selection of keys without a 4D mask", USE_ANOTHER),
    "block_indices": ("a sparse selection of key blocks", USE_ANOTHER),
    "sinks": ("a learned sink for each row", USE_EAGER),
}
# Keywords of packed sequences. The operators need the boundaries, from a 4D mask or from `Lengths`.
PACKING = frozenset({"cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens_q", "cu_seqlens_k", "seq_idx"})
# Keywords that models pass along and attention ignores.
_HARMLESS = frozenset(
    {
        "cache_position",
        "deterministic",
        "input_ids",
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
        "tokenizer",  # passed along by `generate`
        "use_cache",
    }
)


class MeaningRefusedError(NotImplementedError):
    """A refusal under either policy: transformers' sdpa function would silently ignore the argument."""


def refusal_of_operator(module: nn.Module, refusal: Exception, advice: str = USE_ANOTHER) -> Exception:
    """The refusal without the operator's advice, which is for direct callers."""
    what, _, _advice = str(refusal).splitlines()[0].partition("; ")
    return type(refusal)(f"{_who(module)}: {what}; {advice}")


def reason_of(refusal: Exception) -> str:
    """The reason without the layer and the advice."""
    return str(refusal).partition(": ")[2].rpartition("; ")[0]


def _who(module: nn.Module) -> str:
    return f"fattn attention in {type(module).__name__}"


def refuse(module: nn.Module, what: str, advice: str) -> NoReturn:
    raise NotImplementedError(f"{_who(module)}: {what}; {advice}")


def refuse_meaning(module: nn.Module, what: str, advice: str) -> NoReturn:
    raise MeaningRefusedError(f"{_who(module)}: {what}; {advice}")


def refuse_training(module: nn.Module, why: str) -> NoReturn:
    refuse(
        module,
        why,
        'train with attn_implementation="sdpa", or infer after model.eval() or under torch.no_grad()',
    )


def refuse_keywords(module: nn.Module, keywords: dict[str, Any], separates: bool = False) -> None:
    """Refuses unknown keywords. `separates`: the mask or the lengths separate packed sequences."""
    for name, value in keywords.items():
        if value is None or value is False or name in _HARMLESS:
            continue
        if name in _UNBUILT:
            meaning, advice = _UNBUILT[name]
            refuse_meaning(module, f"{name} ({meaning}) is not implemented", advice)
        if name in PACKING:
            if not separates:
                refuse_meaning(
                    module,
                    f"{name} (packed sequences) is not enough by itself",
                    "pass cu_seq_lens_q and cu_seq_lens_k without an attention_mask, or position_ids that "
                    "restart at every sequence",
                )
            continue
        refuse_meaning(
            module, f"the keyword {name} is unknown and may change the result of attention", USE_ANOTHER
        )
    if keywords.get("output_attentions"):
        warn('fattn attention does not return attention weights; use attn_implementation="eager" for them')


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
