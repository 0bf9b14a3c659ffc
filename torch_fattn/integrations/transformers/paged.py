"""Continuous batching: attention over the cache of `generate_batch`.

The query holds the packed new tokens of many requests, and the keys are in transformers' own cache. Its
`read_index`, the slots of all keys of every request, serves as a block table, so the operators read the cache
in place. Keys are gathered in three cases: several new tokens of a sliding layer, which overwrite slots that
the first of them still sees; heads that must be padded; and, from 5.24 on, models that change keys between
the cache and the attention function.

In 5.23 the model also requests a mask of only the new tokens, as without a cache. It adds nothing to the
lengths.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from ...operators.differentiable import needs_gradient
from ...operators.head_padding import HEAD_STEP, pad_heads, without_padding
from .call import Call
from .compat import paged_layer, update_paged
from .support import USE_PAGED_EAGER
from .unsupported import (
    falls_back,
    reason_of,
    refusal_of_operator,
    refuse,
    refuse_keywords,
    refuse_training,
    run_fallback,
)
from .visibility import Lengths

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

# Block tables serve all layers of a group. They are cached as long as the write index exists.
_tables_of: Any = WeakTensorKeyDictionary()


def attend_over_cache(call: Call, attention_mask: Any, cache: Any) -> tuple[Tensor, None]:
    """Attention of query `[1,Hq,T,D]`; writes key and value `[1,Hkv,T,..]` of the new tokens to `cache`. From
    5.24 on, the model has already done so: `cache` is None, and key and value are complete. Rows are causal
    for any `is_causal`. Unsupported layers fall back as without the cache."""
    module, kwargs = call.module, call.keywords
    if module.training and needs_gradient(call.query, call.key, call.value):
        refuse_training(module, "continuous batching with gradients enabled has no backward")
    if why := call.why_not_trained():
        refuse_training(module, why)
    if attention_mask is not None and not hasattr(cache, "layer_to_allocator"):
        refuse(module, "a mask came with continuous batching", USE_PAGED_EAGER)
    if kwargs.get("block_table") is not None:
        refuse(module, "transformers' own block table is not supported", USE_PAGED_EAGER)
    others = {name: kwargs[name] for name in kwargs.keys() - _OF_THE_BATCH}
    refuse_keywords(module, others | {"position_bias": call.position_bias})
    if "cu_seq_lens_q" not in kwargs:
        refuse(module, "a cache came without cu_seq_lens_q, the lengths of a batch", USE_PAGED_EAGER)

    cu_seqlens_q: Tensor = kwargs["cu_seq_lens_q"]
    max_seqlen_q = int(_either(kwargs, "max_seqlen_q", "max_length_q"))
    if cache is not None:
        keys = write(cache, module.layer_idx, call.key, call.value, kwargs, call.sliding_window)  # type: ignore[arg-type]
    else:
        keys = _keys_of_model(call)
    call = replace(call, sliding_window=keys.window, is_causal=True)
    rows, key_cache, value_cache, scale = pad_heads(
        call.query[0].transpose(0, 1), keys.key_cache, keys.value_cache, call.scaling
    )
    operands = (key_cache, value_cache, keys.block_tables, keys.seq_lens)
    options = call.options | {"scale": scale, "window_left": call.window_left}
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
        # Gather the keys of all requests into one row, and mask.
        key, value = (keys.gather(each) for each in (keys.key_cache, keys.value_cache))
        call = replace(call, key=key, value=value, keywords={})
        cu_seqlens_k = torch.nn.functional.pad(keys.seq_lens.cumsum(0), (1, 0))
        lengths = Lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, keys.total)
        instead = run_fallback(call, reason_of(refused), lengths)
        if instead is None:
            raise refused from refusal
        return instead
    return without_padding(out, keys.value_cache.shape[-1])[None], None


def _keys_of_model(call: Call) -> PagedKeys:
    key, value, kwargs = call.key, call.value, call.keywords
    if isinstance(key, InCache) and isinstance(value, InCache) and key.keys is value.keys:
        return key.keys
    ends, longest = kwargs["cu_seq_lens_k"], _either(kwargs, "max_seqlen_k", "max_length_k")
    if isinstance(ends, dict):
        refuse(call.module, "its keys are not those that its cache has for it", USE_PAGED_EAGER)
    key, value = (each.gathered() if isinstance(each, InCache) else each for each in (key, value))
    return _in_order(
        key[0].transpose(0, 1), value[0].transpose(0, 1), ends, int(longest), call.sliding_window
    )


class PagedKeys(NamedTuple):
    """The paged operators' arguments."""

    key_cache: Tensor  # [blocks, block_size, Hkv, D]
    value_cache: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    total: int  # keys of all requests
    window: int | None

    def gather(self, cache: Tensor) -> Tensor:
        """`[1, Hkv, total, D]`, request after request."""
        ends = self.seq_lens.cumsum(0)
        token = torch.arange(self.total, device=cache.device)
        request = torch.searchsorted(ends, token, right=True).clamp(max=ends.shape[0] - 1)
        at = token - (ends - self.seq_lens)[request]
        block = self.block_tables[request, at // cache.shape[1]].long()
        return cache[block, at % cache.shape[1]].transpose(0, 1)[None]


class InCache(Tensor):
    """The result of `PagedAttentionCache.update` of 5.24 under `fattn`: keys or values of all requests,
    `[1, Hkv, total, D]`, without memory. The attention function reads the cache; any other use gathers
    them first."""

    keys: PagedKeys
    cache: Tensor

    @staticmethod
    def of(keys: PagedKeys, cache: Tensor) -> InCache:
        shape = (1, cache.shape[2], keys.total, cache.shape[3])
        made = InCache._make_wrapper_subclass(InCache, shape, dtype=cache.dtype, device=cache.device)
        made.keys, made.cache = keys, cache
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map_only(InCache, InCache.gathered, (args, kwargs or {}))
        return func(*args, **kwargs)

    def gathered(self) -> Tensor:
        return self.keys.gather(self.cache)


def update_in_place(
    cache: Any, key: Tensor, value: Tensor, layer_idx: int, kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """`PagedAttentionCache.update` of 5.24, with gathering on demand."""
    keys = write(cache, layer_idx, key, value, kwargs)
    for name in ("cu_seq_lens_k", "max_length_k"):
        kwargs[name] = _of_kind(kwargs[name], cache.layer_to_allocator[layer_idx].layer_type)
    return InCache.of(keys, keys.key_cache), InCache.of(keys, keys.value_cache)


def write(
    cache: Any,
    layer_idx: int,
    key: Tensor,
    value: Tensor,
    kwargs: dict[str, Any],
    sliding_window: int | None = None,
) -> PagedKeys:
    """`PagedAttentionCache.update` without unnecessary copies of all keys. The method of 5.17 treats a
    window of 1 as no window and would read unwritten slots; tokens that see only themselves do not need
    the cache."""
    layer = paged_layer(cache, layer_idx)
    sees_itself = 1 in (sliding_window, layer.window)
    kind = "sliding_attention" if sees_itself else layer.kind
    ends: Tensor = _of_kind(kwargs["cu_seq_lens_k"], kind)
    longest = int(_of_kind(_either(kwargs, "max_seqlen_k", "max_length_k"), kind))
    if sees_itself:
        return _in_order(key[0].transpose(0, 1), value[0].transpose(0, 1), ends, longest, 1)
    read_index, write_index = kwargs["read_index"][layer.group], kwargs["write_index"][layer.group]
    odd_heads = key.shape[-1] % HEAD_STEP or value.shape[-1] % HEAD_STEP
    overwrites = layer.window is not None and int(_either(kwargs, "max_seqlen_q", "max_length_q")) > 1
    if read_index.numel() == 0 or odd_heads or overwrites:
        return _in_order(*update_paged(cache, layer_idx, key, value, kwargs), ends, longest, layer.window)

    for pool, new in zip(layer.pools, (key, value), strict=True):
        pool.index_copy_(0, write_index, new[0].transpose(0, 1))
    located = _tables_of.get(write_index)
    if located is None:
        seq_lens = ends.diff()
        newest = None if layer.window is None else write_index
        tables = _block_tables(read_index, newest, ends, seq_lens, longest, layer.block_size)
        _tables_of[write_index] = located = tables, seq_lens
    keys, values = (pool.unflatten(0, (-1, layer.block_size)) for pool in layer.pools)
    tables, seq_lens = located
    return PagedKeys(keys, values, tables, seq_lens, read_index.numel(), layer.window)


def _in_order(key: Tensor, value: Tensor, ends: Tensor, longest: int, window: int | None) -> PagedKeys:
    """The packed keys `[keys, Hkv, D]` of all requests, as a pool of blocks of one key."""
    keys = torch.arange(longest, dtype=torch.int32, device=key.device)
    tables = ends[:-1, None] + keys
    return PagedKeys(key[:, None], value[:, None], tables, ends.diff(), key.shape[0], window)


def _either(kwargs: dict[str, Any], name: str, later_name: str) -> Any:
    return kwargs[name] if name in kwargs else kwargs[later_name]


def _of_kind(of_all: Any, kind: str) -> Any:
    return of_all[kind] if isinstance(of_all, dict) else of_all


def _block_tables(
    read_index: Tensor,
    newest: Tensor | None,
    ends: Tensor,
    seq_lens: Tensor,
    longest: int,
    block_size: int,
) -> Tensor:
    """Block tables from the slots of all keys. In a full layer, slots are consecutive within a block. In a
    sliding layer they form a ring, and only the write index has the slot of each request's newest key."""
    firsts = torch.arange(0, longest, block_size, device=read_index.device)
    at = (ends[:-1, None] + firsts).clamp_(max=read_index.shape[0] - 1)
    slots = read_index[at]
    if newest is not None:
        slots = torch.where(firsts == seq_lens[:, None] - 1, newest[:, None], slots)
    return (slots // block_size).to(torch.int32)
