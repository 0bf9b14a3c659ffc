"""Continuous batching: attention over the cache of `generate_batch`.

The query holds the packed new tokens of many requests, and the keys are in transformers' own cache. Its
`read_index`, the slots of every key of every request, serves as a block table, so the operators read the
cache in place. Keys are gathered in three cases: several new tokens of a sliding layer, which overwrite slots
that the first of them still sees; sliding layers of later transformers, whose cache is not accessible; and
heads that must be padded.

After transformers 5.17 the model also requests a mask of the new tokens alone, as it does without a cache;
the lengths already contain that information.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ...operators.differentiable import needs_gradient
from ...operators.head_padding import HEAD_STEP, pad_heads, without_padding
from ...runtime.signatures import public
from .compat import PagedLayer, paged_layer, update_paged
from .fallback import run_fallback
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
# The block tables of a batch serve all layers of a group, and are cached as long as the write index exists.
_tables_of: Any = WeakTensorKeyDictionary()


class _Keys(NamedTuple):
    """The arguments of the paged operators that follow the query."""

    key_cache: Tensor  # [blocks, block_size, Hkv, D]
    value_cache: Tensor
    block_tables: Tensor
    seq_lens: Tensor


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
    """Attention of query `[1,Hq,T,D]`; writes key and value `[1,Hkv,T,..]` of the new tokens to `cache`.
    Returns `([1,T,Hq,Dv], None)`. Rows are causal for any `is_causal`. Layers that the kernels cannot run
    fall back as they do without the cache."""
    if module.training and needs_gradient(query, key, value):
        refuse_training(module, "continuous batching with gradients enabled has no backward")
    if why := why_not_trained(module, query, key, value, dropout=dropout):
        refuse_training(module, why)
    if cache is None:
        refuse(module, "there is no cache of continuous batching", 'use attn_implementation="fattn"')
    if attention_mask is not None and not hasattr(cache, "layer_to_allocator"):
        refuse(module, "a mask came with continuous batching", USE_PAGED_EAGER)
    if kwargs.get("block_table") is not None:
        refuse(module, "transformers' own block table is not supported", USE_PAGED_EAGER)
    refuse_keywords(module, None, {name: kwargs[name] for name in kwargs.keys() - _OF_THE_BATCH})
    if "cu_seq_lens_q" not in kwargs:
        refuse(module, "a cache came without cu_seq_lens_q, the lengths of a batch", USE_PAGED_EAGER)

    cu_seqlens_q: Tensor = kwargs["cu_seq_lens_q"]
    max_seqlen_q = int(_either(kwargs, "max_seqlen_q", "max_length_q"))
    layer_idx: Any = module.layer_idx
    layer = paged_layer(cache, layer_idx)
    if sliding_window != 1:  # the cache of 5.17 does not represent a window of 1
        sliding_window = layer.window
    keys = _write_and_locate(cache, layer, layer_idx, key, value, sliding_window, max_seqlen_q, kwargs)

    value_dim = keys.value_cache.shape[-1]
    rows, key_cache, value_cache, scale = pad_heads(
        query[0].transpose(0, 1), keys.key_cache, keys.value_cache, scaling
    )
    operands = keys._replace(key_cache=key_cache, value_cache=value_cache)
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


def _run_fallback(
    module: nn.Module,
    query: Tensor,
    keys: _Keys,
    cu_seqlens_q: Tensor,
    why: str,
    *,
    sliding_window: int | None,
    **options: Any,
) -> tuple[Tensor, None] | None:
    """Another attention function over all keys of all requests in one row, with a mask. Slots past the end of
    a request may hold anything, even NaN, and are set to 0."""
    longest = keys.block_tables.shape[1] * keys.key_cache.shape[1]
    position = torch.arange(longest, device=query.device)
    filled = position < keys.seq_lens[:, None]
    blocks = keys.block_tables.long().clamp(max=keys.key_cache.shape[0] - 1)  # absent keys have no slot
    key, value = (
        cache[blocks].flatten(1, 2).masked_fill(~filled[:, :, None, None], 0)
        for cache in (keys.key_cache, keys.value_cache)
    )
    row = torch.arange(query.shape[2], device=query.device)
    request = torch.searchsorted(cu_seqlens_q[1:].contiguous(), row, right=True).clamp(
        max=filled.shape[0] - 1
    )
    newest = keys.seq_lens - cu_seqlens_q[1 : filled.shape[0] + 1]
    distance = (row + newest[request])[:, None, None] - position
    seen = (distance >= 0) & (
        request[:, None, None] == torch.arange(filled.shape[0], device=row.device)[:, None]
    )
    if sliding_window is not None:
        seen &= distance < sliding_window
    key, value = (operand.flatten(0, 1).transpose(0, 1)[None] for operand in (key, value))
    return run_fallback(
        module, query, key, value, seen.flatten(1)[None, None], why, sliding_window=sliding_window, **options
    )


def _write_and_locate(
    cache: Any,
    layer: PagedLayer,
    layer_idx: int,
    key: Tensor,
    value: Tensor,
    window: int | None,
    max_seqlen_q: int,
    kwargs: dict[str, Any],
) -> _Keys:
    """Does the work of `PagedAttentionCache.update`, without the copy of all keys where it is not needed. The
    method of 5.17 treats a window of 1 as no window and would read unwritten slots; tokens that see only
    themselves need no cache."""
    kind = layer.kind if window is None else "sliding_attention"
    ends: Tensor = _of_kind(kwargs["cu_seq_lens_k"], kind)
    max_seqlen_k = int(_of_kind(_either(kwargs, "max_seqlen_k", "max_length_k"), kind))
    if window == 1:
        return _in_order(key[0].transpose(0, 1), value[0].transpose(0, 1), ends, max_seqlen_k)
    read_index, write_index = kwargs["read_index"][layer.group], kwargs["write_index"][layer.group]
    nothing_cached = read_index.numel() == 0
    odd_heads = key.shape[-1] % HEAD_STEP or value.shape[-1] % HEAD_STEP
    overwrites = window is not None and max_seqlen_q > 1
    if layer.pools is None or nothing_cached or odd_heads or overwrites:
        return _in_order(*update_paged(cache, layer_idx, key, value, kwargs), ends, max_seqlen_k)

    for pool, new in zip(layer.pools, (key, value), strict=True):
        pool.index_copy_(0, write_index, new[0].transpose(0, 1))
    located = _tables_of.get(write_index)
    if located is None:
        seq_lens = ends.diff()
        newest = None if window is None else write_index
        tables = _block_tables(read_index, newest, ends, seq_lens, max_seqlen_k, layer.block_size)
        located = _tables_of[write_index] = tables, seq_lens
    key_cache, value_cache = (pool.unflatten(0, (-1, layer.block_size)) for pool in layer.pools)
    return _Keys(key_cache, value_cache, *located)


def _block_tables(
    read_index: Tensor,
    newest: Tensor | None,
    ends: Tensor,
    seq_lens: Tensor,
    max_seqlen_k: int,
    block_size: int,
) -> Tensor:
    """Block tables from the slots of all keys. The slots of a full layer are consecutive within a block.
    Those of a sliding layer form a ring, and only the write index has the slot of each request's newest
    key."""
    firsts = torch.arange(0, max_seqlen_k, block_size, device=read_index.device)
    at = (ends[:-1, None] + firsts).clamp_(max=read_index.shape[0] - 1)
    slots = read_index[at]
    if newest is not None:
        slots = torch.where(firsts == seq_lens[:, None] - 1, newest[:, None], slots)
    return (slots // block_size).to(torch.int32)


def _in_order(key: Tensor, value: Tensor, ends: Tensor, max_seqlen_k: int) -> _Keys:
    """The packed keys `[keys, Hkv, D]` of all requests, as a pool of blocks of one key."""
    keys = torch.arange(max_seqlen_k, dtype=torch.int32, device=key.device)
    return _Keys(key[:, None], value[:, None], ends[:-1, None] + keys, ends.diff())


def _of_kind(of_all: Any, kind: str) -> Any:
    return of_all[kind] if isinstance(of_all, dict) else of_all


def _either(kwargs: dict[str, Any], name: str, later_name: str) -> Any:
    return kwargs[name] if name in kwargs else kwargs[later_name]
