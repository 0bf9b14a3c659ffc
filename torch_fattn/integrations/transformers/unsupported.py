"""Unsupported layers and models: the policy of `register(on_unsupported=...)`, and refusals."""

from __future__ import annotations

import re
from typing import Any, Literal, NoReturn, get_args

import torch
from torch import nn

from ...runtime.signatures import shown
from ...runtime.warn import warn
from .support import USE_ANOTHER, USE_EAGER

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
