"""Continuous batching: attention over the cache of `generate_batch`.

The query holds the packed new tokens of many requests, and the keys are in transformers' own cache. Its
`read_index`, the slots of every key of every request, serves as a block table, so the operators read the
cache in place (`paged_keys`). Keys are gathered in three cases: several new tokens of a sliding layer, which
overwrite slots that the first of them still sees; heads that must be padded; and from 5.24 on models that
change the keys between the cache and the attention function.

In 5.23 the model also requests a mask of the new tokens alone, as it does without a cache; the lengths
already contain that information.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...operators.differentiable import needs_gradient
from ...operators.head_padding import pad_heads, without_padding
from ...runtime.signatures import public
from .fallback import run_fallback
from .paged_keys import InCache, PagedKeys, either, in_order, write
from .policy import falls_back
from .refusals import (
    reason_of,
    refusal_of_operator,
    refuse,
    refuse_keywords,
    refuse_training,
    why_not_trained,
)
from .support import USE_PAGED_EAGER

_OF_THE_BATCH = frozenset(
    {
        "block_table",
        "cu_seq_lens_k",
        "cu_seq_lens_q",
        "logits_indices",
        "logits_processor_args",
        "max_length_k",
        "max_length_q",
        "max_seqlen_k",
        "max_seqlen_q",
        "read_index",
        "write_index",
    }
)


@public("torch_fattn.integrations.transformers.attend_paged", ahead=False)
def attend_paged(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    cache: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of query `[1,Hq,T,D]`; writes key and value `[1,Hkv,T,..]` of the new tokens to `cache`. From
    5.24 on there is none: the model did that, and these are all keys. Returns `([1,T,Hq,Dv], None)`. Rows are
    causal for any `is_causal`. Layers that the kernels cannot run fall back as they do without the cache."""
    if module.training and needs_gradient(query, key, value):
        refuse_training(module, "continuous batching with gradients enabled has no backward")
    if why := why_not_trained(module, query, key, value, dropout=dropout):
        refuse_training(module, why)
    if cache is None and "write_index" not in kwargs:
        refuse(module, "there is no cache of continuous batching", 'use attn_implementation="fattn"')
    if attention_mask is not None and not hasattr(cache, "layer_to_allocator"):
        refuse(module, "a mask came with continuous batching", USE_PAGED_EAGER)
    if kwargs.get("block_table") is not None:
        refuse(module, "transformers' own block table is not supported", USE_PAGED_EAGER)
    refuse_keywords(module, None, {name: kwargs[name] for name in kwargs.keys() - _OF_THE_BATCH})
    if "cu_seq_lens_q" not in kwargs:
        refuse(module, "a cache came without cu_seq_lens_q, the lengths of a batch", USE_PAGED_EAGER)

    cu_seqlens_q: Tensor = kwargs["cu_seq_lens_q"]
    max_seqlen_q = int(either(kwargs, "max_seqlen_q", "max_length_q"))
    if cache is not None:
        keys = write(cache, module.layer_idx, key, value, kwargs, sliding_window)  # type: ignore[arg-type]
    else:
        keys = _keys_of_model(module, key, value, sliding_window, kwargs)
    sliding_window = keys.window

    value_dim = keys.value_cache.shape[-1]
    rows, key_cache, value_cache, scale = pad_heads(
        query[0].transpose(0, 1), keys.key_cache, keys.value_cache, scaling
    )
    operands = (key_cache, value_cache, keys.block_tables, keys.seq_lens)
    options: dict[str, Any] = {
        "scale": scale,
        "softcap": softcap or 0.0,
        "sinks": s_aux,
        "window_left": -1 if sliding_window is None else sliding_window - 1,
    }
    try:
        if max_seqlen_q == 1 and rows.shape[0] == keys.seq_lens.shape[0]:
            out, _lse = torch.ops.fattn.paged_decode(rows[:, :, None], *operands, **options)
            out = out[:, :, 0]
        else:
            out, _lse = torch.ops.fattn.paged_prefill(
                rows, *operands, cu_seqlens_q, max_seqlen_q, is_causal=True, **options
            )
    except (NotImplementedError, TypeError, ValueError) as refusal:
        refused = refusal_of_operator(module, refusal, USE_PAGED_EAGER)
        if not falls_back():
            raise refused from refusal
        of_layer: dict[str, Any] = {"softcap": softcap, "s_aux": s_aux, "sliding_window": sliding_window}
        of_layer |= {"dropout": dropout, "scaling": scaling}
        instead = _run_fallback(module, query, keys, cu_seqlens_q, reason_of(refused), **of_layer)
        if instead is None:
            raise refused from refusal
        return instead
    return without_padding(out, value_dim)[None], None


def _keys_of_model(
    module: nn.Module, key: Tensor, value: Tensor, window: int | None, kwargs: dict[str, Any]
) -> PagedKeys:
    if isinstance(key, InCache) and isinstance(value, InCache) and key.keys is value.keys:
        return key.keys
    ends, longest = kwargs["cu_seq_lens_k"], either(kwargs, "max_seqlen_k", "max_length_k")
    if isinstance(ends, dict):
        refuse(module, "its keys are not those that its cache has for it", USE_PAGED_EAGER)
    key, value = (each.gathered() if isinstance(each, InCache) else each for each in (key, value))
    return in_order(key[0].transpose(0, 1), value[0].transpose(0, 1), ends, int(longest), window)


def _run_fallback(
    module: nn.Module,
    query: Tensor,
    keys: PagedKeys,
    cu_seqlens_q: Tensor,
    why: str,
    **options: Any,
) -> tuple[Tensor, None] | None:
    """Another attention function over all keys of all requests in one row, with a mask."""
    key, value = (keys.gather(cache) for cache in (keys.key_cache, keys.value_cache))
    cu_seqlens_k = torch.nn.functional.pad(keys.seq_lens.cumsum(0), (1, 0))
    lengths = cu_seqlens_q, cu_seqlens_k
    return run_fallback(module, query, key, value, None, why, lengths, is_causal=True, **options)
