"""Small caches, and their whole state to compare."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_fattn import CacheStep, PagedKVCache, StaticKVCache, reference

LAYERS, KV_HEADS, HEADS, DIM, VALUE_DIM = 2, 2, 4, 32, 64
LATENT_DIM = 32


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
    """Whether two snapshots are equal, bit by bit."""
    pairs = [*zip(a[-1], b[-1], strict=True)]
    bits = [tuple(tensor.contiguous().view(torch.uint8) for tensor in pair) for pair in pairs]
    return bool(a[:-1] == b[:-1]) and all(torch.equal(x, y) for x, y in bits)


class Dense:
    """The plain cache to compare with: for every sequence and layer its keys and values, token by token, as a
    cache of that format has them."""

    def __init__(self, kv_format: str = "auto", is_latent: bool = False, dim: int = DIM) -> None:
        self.kv_format, self.is_latent, self.dim = kv_format, is_latent, dim
        self.tokens: dict[int, list[list[tuple[Tensor, Tensor]]]] = {}
        self.generator = torch.Generator().manual_seed(0)

    def rows(self, count: int, heads: int, dim: int) -> Tensor:
        return torch.randn(count, heads, dim, generator=self.generator)

    def append(
        self,
        cache: PagedKVCache | StaticKVCache,
        step: CacheStep,
        counts: Sequence[int],
        device: str,
        layers: int = LAYERS,
    ) -> None:
        """Random tokens in the first layers; they count if these are all."""
        for layer in range(layers):
            key, value = (
                self.rows(sum(counts), KV_HEADS, self.dim),
                self.rows(sum(counts), KV_HEADS, VALUE_DIM),
            )
            cache.append(layer, step, key.to(device), *([] if self.is_latent else [value.to(device)]))
            if self.kv_format != "auto":
                key, value = (
                    reference.dequantise(*reference.quantise(rows, self.kv_format), self.kv_format)
                    for rows in (key, value)
                )
            if self.is_latent:
                value = key[..., :LATENT_DIM]
            if layers < LAYERS:
                continue
            pairs = iter(zip(key, value, strict=True))
            for sequence, count in zip(step.sequences, counts, strict=True):
                own = self.tokens.setdefault(sequence, [[] for _ in range(LAYERS)])
                own[layer] += [next(pairs) for _ in range(count)]

    def check(
        self,
        cache: PagedKVCache | StaticKVCache,
        step: CacheStep,
        device: str,
        *,
        rows: int = 1,
        exact_options: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """Each sequence's newest rows, in every layer."""
        for layer in range(LAYERS):
            query = self.rows(len(step.sequences) * HEADS, rows, self.dim).view(-1, HEADS, rows, self.dim)
            out = cache.decode(layer, step, query.to(device), **options).cpu()
            for b, sequence in enumerate(step.sequences):
                stored = self.tokens.get(sequence, [[]] * LAYERS)[layer]
                assert len(stored) == step.lengths[b]
                key, value = (torch.empty(KV_HEADS, 0, dim) for dim in (self.dim, out.shape[-1]))
                if stored:
                    key, value = (torch.stack(side, 1) for side in zip(*stored, strict=True))
                given = options if exact_options is None else exact_options
                exact, _ = reference.decode(query[b : b + 1], key[None], value[None], **given)
                error = (out[b].double() - exact[0]).abs().max()
                assert error <= 1e-5, f"sequence {sequence} of {step.lengths[b]} tokens, layer {layer}"

    def fork(self, source: int, copy: int) -> None:
        self.tokens[copy] = [list(layer) for layer in self.tokens[source]]

    def truncate(self, sequence: int, length: int) -> None:
        self.tokens[sequence] = [layer[:length] for layer in self.tokens[sequence]]
