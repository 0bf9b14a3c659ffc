"""The keys and values of all requests of continuous batching, where transformers' cache has them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from ...operators.head_padding import HEAD_STEP
from .compat import paged_layer, update_paged

# The block tables of a batch serve all layers of a group, and are cached as long as the write index exists.
_tables_of: Any = WeakTensorKeyDictionary()


class PagedKeys(NamedTuple):
    """Arguments of the paged operators, and what else the attention function needs."""

    key_cache: Tensor  # [blocks, block_size, Hkv, D]
    value_cache: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    total: int  # of all requests
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
    """What `PagedAttentionCache.update` of 5.24 returns to a model under `fattn`: keys or values of all
    requests, `[1, Hkv, total, D]`, without memory. The attention function reads the cache; anything else that
    a model does with them gathers them first."""

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
    """`PagedAttentionCache.update` of 5.24, which gathers nothing that it need not."""
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
    """Does the work of `PagedAttentionCache.update`, without the copy of all keys where it is not needed. The
    method of 5.17 treats a window of 1 as no window and would read unwritten slots; tokens that see only
    themselves need no cache."""
    layer = paged_layer(cache, layer_idx)
    sees_itself = 1 in (sliding_window, layer.window)
    kind = "sliding_attention" if sees_itself else layer.kind
    ends: Tensor = _of_kind(kwargs["cu_seq_lens_k"], kind)
    longest = int(_of_kind(either(kwargs, "max_seqlen_k", "max_length_k"), kind))
    if sees_itself:
        return in_order(key[0].transpose(0, 1), value[0].transpose(0, 1), ends, longest, 1)
    read_index, write_index = kwargs["read_index"][layer.group], kwargs["write_index"][layer.group]
    odd_heads = key.shape[-1] % HEAD_STEP or value.shape[-1] % HEAD_STEP
    overwrites = layer.window is not None and int(either(kwargs, "max_seqlen_q", "max_length_q")) > 1
    if read_index.numel() == 0 or odd_heads or overwrites:
        return in_order(*update_paged(cache, layer_idx, key, value, kwargs), ends, longest, layer.window)

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


def in_order(key: Tensor, value: Tensor, ends: Tensor, longest: int, window: int | None) -> PagedKeys:
    """The packed keys `[keys, Hkv, D]` of all requests, as a pool of blocks of one key."""
    keys = torch.arange(longest, dtype=torch.int32, device=key.device)
    tables = ends[:-1, None] + keys
    return PagedKeys(key[:, None], value[:, None], tables, ends.diff(), key.shape[0], window)


def either(kwargs: dict[str, Any], name: str, later_name: str) -> Any:
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
    """Block tables from the slots of all keys. The slots of a full layer are consecutive within a block.
    Those of a sliding layer form a ring, and only the write index has the slot of each request's newest
    key."""
    firsts = torch.arange(0, longest, block_size, device=read_index.device)
    at = (ends[:-1, None] + firsts).clamp_(max=read_index.shape[0] - 1)
    slots = read_index[at]
    if newest is not None:
        slots = torch.where(firsts == seq_lens[:, None] - 1, newest[:, None], slots)
    return (slots // block_size).to(torch.int32)
