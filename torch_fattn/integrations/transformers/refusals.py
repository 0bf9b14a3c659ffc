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


def refusal_of_operator(module: nn.Module, refusal: Exception, advice: str = USE_ANOTHER) -> Exception:
    """The operator's own advice is for who calls it directly."""
    what, _, _advice = str(refusal).splitlines()[0].partition("; ")
    return type(refusal)(f"{_who(module)}: {what}; {advice}")


def _who(module: nn.Module) -> str:
    return f"fattn attention in {type(module).__name__}"


def refuse(module: nn.Module, what: str, advice: str) -> NoReturn:
    raise NotImplementedError(f"{_who(module)}: {what}; {advice}")


def refuse_training(module: nn.Module, *inputs: Tensor, dropout: float) -> None:
    """The line is training mode *and* inputs that require gradients *and* gradients enabled: someone is about
    to call backward. `model(ids)` after eval(), without no_grad, has the last two as well and goes on."""
    if module.training and torch.is_grad_enabled() and any(t.requires_grad for t in inputs):
        refuse(
            module,
            "the model is in training mode with gradients enabled, and the kernels have no backward",
            'train with attn_implementation="sdpa", or infer after model.eval() or under torch.no_grad()',
        )
    if dropout > 0 and module.training:
        refuse(module, f"dropout {dropout} is not built", "call model.eval() or set the dropout to 0")


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
