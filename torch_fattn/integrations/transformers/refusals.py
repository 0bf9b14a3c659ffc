"""Refuses arguments that no attention function of this package supports, before any work."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import Tensor, nn

from ...operators.differentiable import MAX_BACKWARD_HEAD_DIM, needs_gradient
from ...runtime.warn import warn
from .support import USE_ANOTHER, USE_EAGER

# Keywords that change the result and that the operators cannot express, with advice for each.
_UNBUILT = {
    "head_mask": ("a mask of whole heads", USE_EAGER),
    "position_bias": ("a position bias over the cache of continuous batching", USE_ANOTHER),
    "indices": ("a sparse selection of keys without a 4D mask", USE_ANOTHER),
    "block_indices": ("a sparse selection of key blocks", USE_ANOTHER),
    "sinks": ("a learned sink for each row", USE_EAGER),
}
# Keywords of packed sequences. The operators need the boundaries, from a 4D mask or from the lengths of
# `packed`.
PACKING = frozenset({"cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens_q", "cu_seqlens_k", "seq_idx"})
# Keywords that models pass through and attention does not need.
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
        "tokenizer",  # `generate` passes it through
        "use_cache",
    }
)


class MeaningRefusedError(NotImplementedError):
    """A refusal under either policy: transformers' sdpa function would silently ignore the argument."""


def refusal_of_operator(module: nn.Module, refusal: Exception, advice: str = USE_ANOTHER) -> Exception:
    """The message without the operator's advice, which is for direct callers."""
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


def why_not_trained(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *biases: Tensor | None, dropout: float
) -> str:
    """Why the kernels cannot train a layer: they have no dropout, no gradient of masks and biases, and no
    backward of wide heads. Empty if they can, or if no gradient is needed."""
    if needs_gradient(*biases):
        return "a mask or a position bias requires grad, which has no gradient in the kernels"
    widest = max(query.shape[-1], value.shape[-1])
    if widest > MAX_BACKWARD_HEAD_DIM and needs_gradient(query, key, value):
        return f"gradients of heads of {widest} are not implemented"
    return f"dropout {dropout} is not implemented" if module.training and dropout > 0 else ""


def refuse_training(module: nn.Module, why: str) -> NoReturn:
    refuse(
        module,
        why,
        'train with attn_implementation="sdpa", or infer after model.eval() or under torch.no_grad()',
    )


def refuse_keywords(
    module: nn.Module, mask: Tensor | None, keywords: dict[str, Any], packed: bool = False
) -> None:
    """Refuses unknown keywords. `packed`: the keywords contain the lengths of packed sequences."""
    for name, value in keywords.items():
        if value is None or value is False or name in _HARMLESS:
            continue
        if name in _UNBUILT:
            meaning, advice = _UNBUILT[name]
            refuse_meaning(module, f"{name} ({meaning}) is not implemented", advice)
        if name in PACKING:
            if not packed and (mask is None or mask.ndim != 4):
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
