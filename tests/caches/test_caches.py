"""StaticKVCache and PagedKVCache: packed rows, many sequences, steps, and what is in use. Their histories are
in test_histories.py and test_static.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import torch_fattn
from tests.conftest import counted_launches
from tests.helpers.cache_classes import (
    DIM,
    HEADS,
    KV_HEADS,
    LAYERS,
    VALUE_DIM,
    Dense,
    paged,
    static,
)
from tests.helpers.kv_formats import QUANTISED
from tests.helpers.synchronisations import Synchronisations
from tests.helpers.tensors import same_bits
from torch_fattn import CacheStats, PagedKVCache, StaticKVCache
from torch_fattn.integrations.transformers.fusion.launches import Launches

FORMATS = ("auto", *QUANTISED)


@pytest.mark.parametrize("device", ["cpu", "mps"])
@pytest.mark.parametrize("make", [static, paged])
def test_packed_rows(make: Any, device: str) -> None:
    """`decode` takes them as `append` and `prefill` do, and returns packed results."""
    cache, dense = make(device), Dense()
    sequences = [cache.allocate() for _ in range(3)] if make is paged else [0, 1, 2]
    dense.append(cache, cache.extend(sequences, tokens=(4, 1, 7)), (4, 1, 7), device)
    if make is paged:
        sequences.append(cache.fork(sequences[0]))
        dense.fork(*sequences[::3])
    for chosen, count in ((sequences, 3), (sequences[:0:-1], 1), (sequences, 0)):
        step = cache.extend(chosen, tokens=count)
        dense.append(cache, step, [count] * len(chosen), device)
        query = dense.rows(len(chosen) * max(count, 1), HEADS, DIM).to(device)
        rows = query.unflatten(0, (len(chosen), -1)).transpose(1, 2)
        for options in ({}, {"shared_prefix": True} if make is paged else {"softcap": 3.0}):
            out, lse = cache.decode(1, step, query, return_lse=True, **options)
            exact, exact_lse = cache.decode(1, step, rows, return_lse=True, **options)
            assert torch.equal(out, exact.transpose(1, 2).flatten(0, 1)) and out.is_contiguous()
            assert torch.equal(lse, exact_lse.transpose(0, 1).flatten(1)) and lse.is_contiguous()
            assert torch.equal(cache.decode(1, step, query, **options), out)
    batch = len(sequences)
    with pytest.raises(
        ValueError, match=f"{batch + 1} packed rows and the step {batch} sequences of 1; pass"
    ):
        cache.decode(1, step, torch.zeros(batch + 1, HEADS, DIM, device=device))
    step = cache.extend(sequences[:3], tokens=(1, 0, 2))
    dense.append(cache, step, (1, 0, 2), device)
    with pytest.raises(ValueError, match="packed and the step has 0 to 2 new tokens .*; pass .* prefill"):
        cache.decode(1, step, torch.zeros(3, HEADS, DIM, device=device))


@pytest.mark.parametrize("device", ["cpu", "mps"])
@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("make", [static, paged])
def test_rotated_tokens(make: Any, kv_format: str, device: str) -> None:
    """The bits of `rotary`, then `append`."""
    caches = [make(device, kv_format=kv_format, dtype=torch.float16) for _ in range(2)]
    for cache in caches:
        for memory in cache._layers.tensors():
            memory.fill_(3)
        sequences = [cache.allocate() for _ in range(3)] if make is paged else [0, 1, 2]
    sizes = ((HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, VALUE_DIM))
    norms = dict.fromkeys(("query_norm", "key_norm"), torch.randn(DIM, device=device))
    options: Any = {"style": "pairs", "eps": 1e-5, "rotary_offset": 8, **norms}
    for tokens in ((4, 1, 7), (1, 0, 2)):
        steps = [cache.extend(sequences, tokens=tokens) for cache in caches]
        query, key, value = (torch.randn(sum(tokens), *size, device=device).half() for size in sizes)
        tables = torch.randn(2, sum(tokens), 16, device=device)
        with counted_launches() as launches:
            mine = caches[0].append_rotated(1, steps[0], query, key, value, *tables, **options)
        assert launches == ({"fattn_rotary": 1} if device == "mps" else {}) and mine.is_contiguous()
        rows = (each.transpose(0, 1)[None] for each in (query, key))
        out, rotated = (x[0].transpose(0, 1) for x in torch_fattn.rotary(*rows, *tables[:, None], **options))
        for new_key, is_same in ((key, False), (rotated, True)):  # the first is the control
            caches[1].append(1, steps[1], new_key, value)
            memory = [[*cache._layers.tensors()] for cache in caches]
            assert torch.equal(mine, out) and same_bits(*memory) is is_same
        assert torch.equal(*(c.prefill(1, step, mine) for c, step in zip(caches, steps, strict=True)))


@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_a_limit_of_sequences_costs_nothing(device: str) -> None:
    """The tables grow with the sequences and keep their contents."""
    cache, dense = paged(device, max_sequences=10**9), Dense()
    assert cache._tables.nbytes < 2**20
    first = cache.allocate()
    step = cache.extend([first], 6)
    dense.append(cache, step, [6], device)
    forks = [cache.fork(first) for _ in range(600)]
    assert cache._tables.blocks.shape[0] == 1024 and len(set(cache.sequences)) == 601
    last = forks[-1]
    dense.fork(first, last)
    step = cache.extend([first, last], 1)
    dense.append(cache, step, [1, 1], device)
    dense.check(cache, step, device)


def test_an_old_step_of_the_same_length() -> None:
    cache = paged("cpu")
    sequence = cache.allocate()
    rows = [torch.zeros(5, KV_HEADS, dim) for dim in (DIM, VALUE_DIM)]
    old = cache.extend([sequence], 5)
    cache.append(0, old, *rows)
    cache.truncate(sequence, 3)
    step = cache.extend([sequence], 2)
    with pytest.raises(ValueError, match="has changed since this step"):
        cache.append(0, old, *rows)
    cache.append(0, step, *(row[:2] for row in rows))


@pytest.mark.parametrize("kv_format", FORMATS)
def test_stats(kv_format: str) -> None:
    cache = paged(kv_format=kv_format)
    one = cache.allocate()
    cache.extend([one], 9)
    cache.fork(one)
    columns = {"auto": 4 * (DIM + VALUE_DIM), "int4": (DIM + VALUE_DIM) // 2 + (DIM + VALUE_DIM) // 32 * 4}
    row = columns.get(kv_format, DIM + VALUE_DIM + 2 * 4)
    memory = LAYERS * KV_HEADS * 12 * 4 * row + 4 * 256 * (12 + 1)
    cached = {"cached_blocks": 0, "prefix_hits": 0, "prefix_misses": 0, "evictions": 0, "swapped": 0}
    assert cache.stats == CacheStats(
        blocks=12, free_blocks=9, shared_blocks=3, sequences=2, tokens=18, memory_bytes=memory, **cached
    )
    stored = "torch.float32" if kv_format == "auto" else kv_format
    assert repr(cache) == (
        f"PagedKVCache(2 layers of 2 key-value heads, keys of 32 and values of 64 columns, {stored} on "
        "mps, 12 blocks of 4 tokens; 2 sequences, 18 tokens, 9 blocks free)"
    )


def test_nothing_waits() -> None:
    """The same of paged ones is in test_prefixes.py."""
    cache = static("mps")
    query = torch.zeros(3, HEADS, 1, DIM, device="mps")
    key, value = (torch.zeros(9, KV_HEADS, dim, device="mps") for dim in (DIM, VALUE_DIM))
    with Synchronisations() as found:
        for counts in ((3, 1, 5), (1, 1, 1), (1, 2, 0)):
            step = cache.extend(tokens=counts)
            for layer in range(LAYERS):
                cache.append(layer, step, key[: sum(counts)], value[: sum(counts)])
                cache.decode(layer, step, query)
    assert found.ops == []
    with Synchronisations() as found:
        step.seq_lens.tolist()
    assert found.ops, "the control"


@pytest.mark.parametrize("make", [static, paged])
def test_kernels_of_a_step(make: Any) -> None:
    """Two if it is like the one before, and three more if a sequence enters a block. The control: the first
    step, other sequences, another number of tokens."""
    cache = make("mps")
    one, other = (cache.allocate(), cache.allocate()) if make is paged else (0, 1)
    kernels = []
    for sequences, tokens in (([one, other], [2, 5]), *[([one, other], 1)] * 7, ([other], 1), ([other], 2)):
        launches = Launches(nn.Linear(1, 1, device="mps"))
        with launches.count():
            cache.extend(sequences, tokens=tokens)
        kernels.append(sum(launches.parts.values()))
    first, alike, of_others = kernels[0], kernels[2:8], kernels[8:]
    assert alike == ([2] * 6 if make is static else [2, 5, 5, 2, 2, 5])
    assert min(first, *of_others) > 10


@pytest.mark.host_only
def test_made_in_inference_mode_and_used_outside() -> None:
    rows = torch.randn(3, 2, 64)
    with torch.inference_mode():
        paged = PagedKVCache(1, 8, 2, 64, device="cpu", dtype=torch.float32)
        static = StaticKVCache(1, 1, 8, 2, 64, device="cpu", dtype=torch.float32)
        sequence = paged.allocate()
    step = paged.extend([sequence], 3)
    paged.append(0, step, rows, rows)
    static.append(0, static.extend(tokens=3), rows, rows)
    assert paged.length(sequence) == 3 and torch.equal(static.keys(0)[0, :, :3], rows.transpose(0, 1))


@pytest.mark.host_only
@pytest.mark.parametrize("kv_format", FORMATS)
def test_the_size_of_a_latent_cache(kv_format: str) -> None:
    """576 columns of a key and no value: in 16 bits 576 of the 1088 numbers of both."""
    sizes = {"block_size": 4, "value_dim": 512, "device": "cpu", "kv_format": kv_format}
    cache = PagedKVCache(2, 8, 1, 576, latent=True, **sizes)
    row = {"auto": 576 * 2, "int4": 576 // 2 + 576 // 32 * 4}.get(kv_format, 576 + 4)
    assert cache.stats.memory_bytes == 2 * 8 * 4 * row + 256 * (8 + 1) * 4
