"""sparse_decode reads the selected keys of each row, and only those, and computes what a mask would."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

import torch_fattn
from tests.conftest import counted_launches, decodes, needs_emulator
from tests.helpers.public_calls import heads
from torch_fattn import PagedKVCache, StaticKVCache, reference, sparse_decode

HEADS, KV_HEADS = 4, 2


def selection(draw: random.Random, *shape: int, capacity: int) -> Tensor:
    """Different positions, in any order, some of them -1."""
    count = min(shape[-1], capacity)
    rows = [draw.sample(range(capacity), count) for _ in range(torch.Size(shape[:-1]).numel())]
    indices = torch.tensor(rows, dtype=draw.choice([torch.int32, torch.int64])).view(*shape[:-1], count)
    return indices.masked_fill(torch.rand(indices.shape) < draw.choice([0.0, 0.3]), -1)


def mask_of(indices: Tensor, lengths: list[int], capacity: int, is_causal: bool = True) -> Tensor:
    """bool `[B, Hq, Lq, capacity]`."""
    per_head = indices.long() if indices.dim() == 4 else indices.long()[:, None].expand(-1, KV_HEADS, -1, -1)
    rows, group = indices.shape[-2], HEADS // KV_HEADS
    mask = torch.zeros(*per_head.shape[:-1], capacity + 1, dtype=torch.bool)
    mask = mask.scatter_(-1, per_head.masked_fill(per_head < 0, capacity), True)[..., :-1]
    last = torch.tensor(lengths)[:, None, None, None] - (
        rows - torch.arange(rows)[:, None] if is_causal else 1
    )
    return (mask & (torch.arange(capacity) <= last)).repeat_interleave(group, 1)


def check(out: Tensor, lse: Tensor, *exact: Tensor, tolerance: float = 2e-6) -> None:
    assert (out.cpu() - exact[0].cpu()).abs().max() < tolerance
    assert torch.allclose(lse.cpu().double(), exact[1].cpu().double(), atol=1e-5)


@pytest.mark.parametrize("kv_format", ["auto", "int8", "fp8_e4m3", "int4"])
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_random(seed: int, paged: bool, per_head: bool, kv_format: str, device: str) -> None:
    """Over the caches of this package, as they are in memory."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    rows, batch, dim = draw.choice([1, 3, 20]), draw.choice([1, 3]), 32
    lengths = [draw.randint(rows, 60) for _ in range(batch)]
    new = [torch.randn(2, length, KV_HEADS, dim) for length in lengths]
    sizes: dict[str, Any] = {"dtype": torch.float32, "device": device, "kv_format": kv_format}
    arguments: dict[str, Any] = {}
    if paged:
        cache: Any = PagedKVCache(1, 40, KV_HEADS, dim, block_size=8, **sizes)
        order = [cache.allocate() for _ in range(batch)][::-1]
        step = cache.extend(order, lengths)
        arguments["block_tables"] = step.block_tables
    else:
        cache = StaticKVCache(1, batch, 64, KV_HEADS, dim, **sizes)
        step = cache.extend(tokens=lengths)
    key, value = torch.cat(new, 1).to(device)
    cache.append(0, step, key, value)
    operands = cache._layers.operands(0)
    options = cache._layers.options(0)
    if not paged:
        operands = tuple(each.transpose(1, 2) for each in operands)
        options = {n: o.transpose(1, 2) if isinstance(o, Tensor) else o for n, o in options.items()}
    capacity = 64 if not paged else step.block_tables.shape[1] * 8
    shape = (batch, KV_HEADS, rows, 9) if per_head else (batch, rows, 9)
    indices = selection(draw, *shape, capacity=max(lengths))
    query = torch.randn(batch, HEADS, rows, dim)
    sinks = torch.randn(HEADS) if not per_head and draw.random() < 0.5 else None
    score = {"softcap": draw.choice([0.0, 3.0]), "scale": 0.3}
    with counted_launches() as launches:
        out, lse = sparse_decode(
            query.to(device),
            *operands,
            indices.to(device),
            step.seq_lens,
            sinks=None if sinks is None else sinks.to(device),
            return_lse=True,
            **score,
            **arguments,
            **options,
        )
    assert device == "cpu" or decodes(launches) > 0
    stored = [torch.zeros(batch, KV_HEADS, capacity, dim) for _ in range(2)]
    for whole, of_all in zip(stored, (0, 1), strict=True):
        for b, tokens in enumerate(new):
            rows_of = tokens[of_all]
            if kv_format != "auto":
                rows_of = reference.dequantise(*reference.quantise(rows_of, kv_format), kv_format).float()
            whole[b, :, : lengths[b]] = rows_of.transpose(0, 1)
    mask = mask_of(indices, lengths, capacity)
    check(out, lse, *reference.prefill(query, *stored, mask, sinks=sinks, **score), tolerance=1e-5)


def test_of_a_latent_cache(device: str) -> None:
    """The value is a view of the key, and one head of keys is for all; rows see later keys if told to."""
    torch.manual_seed(0)
    latent, query = torch.randn(2, 1, 50, 96), torch.randn(2, HEADS, 5, 96)
    indices = selection(random.Random(0), 2, 5, 12, capacity=50)
    on = latent.to(device)
    for is_causal in (True, False):
        out, lse = sparse_decode(
            query.to(device),
            on,
            on[..., :64],
            indices.to(device),
            torch.tensor([50, 30], dtype=torch.int32, device=device),
            is_causal=is_causal,
            return_lse=True,
        )
        mask = mask_of(indices, [50, 30], 50, is_causal)
        check(out, lse, *reference.prefill(query, latent, latent[..., :64], mask))


def test_edges(device: str) -> None:
    query, key = heads(2, 4, 3, 16).to(device), heads(2, 2, 10, 16, seed=1).to(device)
    key[:, :, 5] = torch.nan  # not selected
    nothing = torch.full((2, 3, 4), -1, device=device)
    nothing[0, 0, 2] = 10  # beyond the cache
    nothing[1, 0, 0] = 9  # after the row
    out, lse = sparse_decode(query, key, key, nothing, return_lse=True)
    assert not out.any() and bool(lse.isneginf().all())
    for shape in ((2, 3, 0), (0, 3, 4), (2, 0, 4)):
        indices = torch.zeros(shape, dtype=torch.int32, device=device)
        out = sparse_decode(query[: shape[0], :, : shape[1]], key[: shape[0]], key[: shape[0]], indices)
        assert out.shape == (shape[0], 4, shape[1], 16) and not out.any()
    table = torch.tensor([[1, 7], [-1, 0]], dtype=torch.int32, device=device)
    lens = torch.tensor([10, 10], dtype=torch.int32, device=device)
    pool = heads(2, 5, 2, 16, seed=2).to(device)
    every = torch.arange(10, device=device).expand(2, 3, -1)
    out = sparse_decode(query, pool, pool, every, lens, block_tables=table)
    one = sparse_decode(query, pool, pool, every, lens.fill_(10), block_tables=table.clamp(0, 1))
    assert out.isfinite().all() and not torch.equal(out, one), "blocks outside the pool hold no keys"


@pytest.mark.host_only
def test_compiled_for_any_capacity() -> None:
    counter = CompileCounter()
    torch.compiler.reset()
    compiled = torch.compile(sparse_decode, backend=counter, fullgraph=True, dynamic=True)
    for capacity in (10, 24):
        query, key = heads(2, 4, 3, 16), heads(2, 2, capacity, 16, seed=1)
        for cache in (key, key.transpose(1, 2).contiguous().transpose(1, 2)):
            operands = (query, cache, cache, torch.arange(7).expand(2, 3, -1))
            assert torch.equal(compiled(*operands), sparse_decode(*operands))
    assert counter.frame_count <= 2, "one for each layout"


@needs_emulator
def test_bytes_read() -> None:
    """Decode reads the selected keys once for all heads that share them, and a dense decode every key."""
    import softmetal

    keys, count = 2048, 64
    query = torch.randn(1, 8, 1, 64, device="mps", dtype=torch.float16)
    key, value = torch.randn(2, 1, 2, keys, 64, device="mps", dtype=torch.float16)
    indices = torch.randperm(keys)[:count].view(1, 1, count).to("mps")
    read = []
    for call in (
        lambda: sparse_decode(query, key, value, indices),
        lambda: torch_fattn.decode(query, key, value),
    ):
        with softmetal.checks(count_bytes=True), softmetal.record() as launches:
            call()
        ran = [launch for launch in launches if launch["kernel"].startswith("fattn_decode")]
        read.append(sum(launch["buffers_read"][slot] for launch in ran for slot in ("1", "2")))
    of_a_key = 2 * 2 * 64 * 2  # two heads of a key and a value of 64 columns, 2 bytes each
    assert read == [count * of_a_key, keys * of_a_key]
