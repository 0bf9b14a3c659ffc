"""Small caches, and their whole state to compare."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_fattn import PagedKVCache, StaticKVCache

LAYERS, KV_HEADS, HEADS, DIM, VALUE_DIM = 2, 2, 4, 32, 64


def paged(device: str = "mps", **changes: Any) -> PagedKVCache:
    sizes: dict[str, Any] = {"num_layers": LAYERS, "num_blocks": 12, "num_kv_heads": KV_HEADS}
    sizes |= {"head_dim": DIM, "value_dim": VALUE_DIM, "block_size": 4, "dtype": torch.float32}
    return PagedKVCache(**(sizes | {"device": device} | changes))


def static(device: str = "mps", **changes: Any) -> StaticKVCache:
    sizes: dict[str, Any] = {"num_layers": LAYERS, "batch_size": 3, "capacity": 20, "num_kv_heads": KV_HEADS}
    sizes |= {"head_dim": DIM, "value_dim": VALUE_DIM, "dtype": torch.float32}
    return StaticKVCache(**(sizes | {"device": device} | changes))


def snapshot(cache: PagedKVCache) -> tuple[Any, ...]:
    host = [(s, cache.length(s), cache.blocks(s)) for s in cache.sequences]
    device = (cache._tables.blocks, cache._tables.lengths, *cache._layers.tensors())
    pool = list(cache._pool._free), dict(cache._pool._users)
    return host, cache.stats, pool, [tensor.cpu().clone() for tensor in device]


def same(a: Any, b: Any) -> bool:
    return all(
        x == y
        if not isinstance(x, list) or not any(isinstance(t, Tensor) for t in x)
        else all(torch.equal(s.view(torch.uint8), t.view(torch.uint8)) for s, t in zip(x, y, strict=True))
        for x, y in zip(a, b, strict=True)
    )
