"""PagedKVCache with values inside the keys, and with a window whose blocks are released."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers.cache_classes import DIM, HEADS, KV_HEADS, LATENT_DIM, LAYERS, Dense, paged, static
from tests.helpers.kv_formats import QUANTISED
from torch_fattn import PagedKVCache, reference

FORMATS = ("auto", *QUANTISED)


# ---- latent


@pytest.mark.parametrize("device", ["cpu", "mps"])
@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("make", [static, paged])
def test_values_in_the_keys(make: Any, kv_format: str, device: str) -> None:
    """The histories have paged ones; `prefill` reads what `decode` reads."""
    cache = make(device, kv_format=kv_format, latent=True, head_dim=64, value_dim=LATENT_DIM)
    dense = Dense(kv_format, is_latent=True, dim=64)
    sequences = [cache.allocate() for _ in range(3)] if isinstance(cache, PagedKVCache) else [0, 1, 2]
    step = cache.extend(sequences, tokens=(5, 1, 8))
    dense.append(cache, step, (5, 1, 8), device)
    dense.check(cache, step, device)
    query = dense.rows(1, HEADS, 64)
    step = cache.extend(sequences[:1], tokens=1)
    dense.append(cache, step, [1], device)
    out = cache.prefill(0, step, query.to(device)).cpu()
    exact = cache.decode(0, step, query[:, :, None].to(device)).cpu()[:, :, 0]
    assert torch.allclose(out, exact, atol=1e-5)


@pytest.mark.parametrize("kv_format", FORMATS)
def test_the_size_of_a_latent_cache(kv_format: str) -> None:
    """576 columns of a key and no value: in 16 bits 576 of the 1088 numbers of both."""
    cache = PagedKVCache(
        2, 8, 1, 576, block_size=4, value_dim=512, device="cpu", latent=True, kv_format=kv_format
    )
    row = {"auto": 576 * 2, "int4": 576 // 2 + 576 // 32 * 4}.get(kv_format, 576 + 4)
    assert cache.stats.memory_bytes == 2 * 8 * 4 * row + 256 * (8 + 1) * 4


# ---- windows


@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_blocks_behind_a_window(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Released blocks are poisoned: no row reads them. The sequence outgrows the pool."""
    window = {"window_left": 9, "sink_tokens": 2}
    cache, dense = paged(device, **window, num_blocks=8), Dense()
    sequence = cache.allocate()
    monkeypatch.setenv("FATTN_CHECK", "1")
    for tokens in (6, *[1] * 12, 3, 3, 5, *[1] * 20):
        step = cache.extend([sequence], tokens)
        for tensor in cache._layers.tensors():
            free = torch.tensor([b for b in range(8) if b not in cache.blocks(sequence)])
            tensor[free.to(device)] = torch.nan
        dense.append(cache, step, [tokens], device)
        dense.check(cache, step, device, rows=min(tokens, 3), exact_options=window)
        query = dense.rows(tokens, HEADS, DIM)
        out = cache.prefill(0, step, query.to(device), is_causal=True).cpu()
        key, value = (torch.stack(side, 1)[None] for side in zip(*dense.tokens[sequence][0], strict=True))
        exact, _ = reference.prefill(query.transpose(0, 1)[None], key, value, is_causal=True, **window)
        assert torch.allclose(out.double(), exact[0].transpose(0, 1), atol=1e-5)
    assert cache.length(sequence) == 49 > 8 * 4
    blocks = cache.blocks(sequence)
    assert blocks[0] >= 0 and {*blocks[1:9]} == {-1} and min(blocks[9:]) >= 0
    assert cache.free_blocks == 8 - 1 - 4


def test_released_blocks_of_a_window() -> None:
    cache = paged("cpu", window_left=4)
    sequence = cache.allocate()
    for tokens in (12, 1):
        step = cache.extend([sequence], tokens)
        for layer in range(LAYERS):
            cache.append(layer, step, *(torch.zeros(tokens, KV_HEADS, d) for d in (DIM, 64)))
    assert cache.blocks(sequence)[:2] == (-1, 4 - 3) and cache.free_blocks == 12 - 3
    with pytest.raises(ValueError, match=r"rows after 7 tokens .* keep at least 9 tokens, or none"):
        cache.truncate(sequence, 7)
    cache.truncate(sequence, 9)
    cache.truncate(sequence, 0)
    assert cache.free_blocks == 12
    step = cache.extend([sequence], 1)
    for layer in range(LAYERS):
        cache.append(layer, step, *(torch.zeros(1, KV_HEADS, d) for d in (DIM, 64)))
    query = torch.zeros(1, HEADS, 1, DIM)
    for attend, rows in ((cache.decode, query), (cache.prefill, query[0].transpose(0, 1))):
        for options in ({"window_left": 5}, {"sink_tokens": 1}):
            with pytest.raises(ValueError, match=r"is not \d, for which the cache keeps blo"):
                attend(0, step, rows, **options)
        attend(0, step, rows, window_left=4)


def test_a_prefix_behind_a_window() -> None:
    """The window needs only the last blocks of a prefix."""
    cache = paged("cpu", window_left=5, sink_tokens=1)
    tokens = list(range(25))
    first = cache.allocate(tokens)
    for count in (16, 8):
        step = cache.extend([first], count)
        for layer in range(LAYERS):
            cache.append(layer, step, *(torch.zeros(count, KV_HEADS, d) for d in (DIM, 64)))
        cache.commit(first, tokens)
    second = cache.allocate(tokens)
    assert cache.length(second) == 24
    assert cache.blocks(second) == (cache.blocks(first)[0], -1, -1, -1, *cache.blocks(first)[4:])
