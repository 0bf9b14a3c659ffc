"""What no attention function of this package computes is refused, in one sentence, before any work."""

from __future__ import annotations

import warnings
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from .support import USE_ANOTHER, USE_EAGER

# Keywords that change what is computed and that the operators cannot express, and what to do about each.
_UNBUILT = {
    "head_mask": ("a mask of whole heads", USE_EAGER),
    "position_bias": ("a position bias over the cache of continuous batching", USE_ANOTHER),
    "indices": ("a sparse selection of keys without a 4D mask", USE_ANOTHER),
    "block_indices": ("a sparse selection of key blocks", USE_ANOTHER),
}
# Packed sequences: their boundaries are in a 4D mask, or in the lengths that `packed` takes, or nowhere that
# the operators could see.
_PACKING = frozenset({"cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens_q", "cu_seqlens_k", "seq_idx"})
# What models pass along on the way through and attention does not need.
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
        "tokenizer",  # which `generate` lets through
        "use_cache",
    }
)


class MeaningRefusedError(NotImplementedError):
    """Nothing else runs instead: transformers' sdpa function would drop what is refused, and compute
    something else without a word."""


def refusal_of_operator(module: nn.Module, refusal: Exception, advice: str = USE_ANOTHER) -> Exception:
    """The operator's own advice is for who calls it directly."""
    what, _, _advice = str(refusal).splitlines()[0].partition("; ")
    return type(refusal)(f"{_who(module)}: {what}; {advice}")


def reason_of(refusal: Exception) -> str:
    """Without the layer and without the advice."""
    return str(refusal).partition(": ")[2].rpartition("; ")[0]


def _who(module: nn.Module) -> str:
    return f"fattn attention in {type(module).__name__}"


def refuse(module: nn.Module, what: str, advice: str) -> NoReturn:
    raise NotImplementedError(f"{_who(module)}: {what}; {advice}")


def refuse_meaning(module: nn.Module, what: str, advice: str) -> NoReturn:
    raise MeaningRefusedError(f"{_who(module)}: {what}; {advice}")


def training(module: nn.Module, *inputs: Tensor, dropout: float) -> str:
    """Why the kernels, which have no backward and no dropout, are not what a layer in training mode asks for;
    empty where they are. The line is training mode *and* inputs that require gradients *and* gradients
    enabled: someone is about to call backward. `model(ids)` after eval(), without no_grad, has the last two
    as well and goes on."""
    if not module.training:
        return ""
    if torch.is_grad_enabled() and any(t.requires_grad for t in inputs):
        return "the model is in training mode with gradients enabled, and the kernels have no backward"
    return f"dropout {dropout} is not built" if dropout > 0 else ""


def refuse_training(module: nn.Module, *inputs: Tensor, dropout: float) -> None:
    if why := training(module, *inputs, dropout=dropout):
        refuse(
            module,
            why,
            'train with attn_implementation="sdpa", or infer after model.eval() or under torch.no_grad()',
        )


def refuse_keywords(
    module: nn.Module, mask: Tensor | None, keywords: dict[str, Any], packed: bool = False
) -> None:
    """`packed`: the lengths of packed sequences are taken from the keywords."""
    for name, value in keywords.items():
        if value is None or value is False or name in _HARMLESS:
            continue
        if name in _UNBUILT:
            meaning, advice = _UNBUILT[name]
            refuse_meaning(module, f"{name} ({meaning}) is not built", advice)
        if name in _PACKING:
            if not packed and (mask is None or mask.ndim != 4):
                refuse_meaning(
                    module,
                    f"{name} (packed sequences) says too little by itself",
                    "pass cu_seq_lens_q and cu_seq_lens_k without an attention_mask, or position_ids that "
                    "restart at every sequence",
                )
            continue
        refuse_meaning(
            module, f"the keyword {name} is unknown and may change what attention means", USE_ANOTHER
        )
    if keywords.get("output_attentions"):
        warnings.warn(
            'fattn attention does not return attention weights; use attn_implementation="eager" for them',
            stacklevel=3,
        )
