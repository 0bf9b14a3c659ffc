"""StaticKVCache in random histories of all its methods, with memory running out, against a dense model."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch

from tests.helpers.cache_classes import (
    DIM,
    HEADS,
    KV_HEADS,
    LATENT_DIM,
    LAYERS,
    VALUE_DIM,
    Dense,
    static,
)
from tests.helpers.faults import with_faults
from tests.helpers.kv_formats import QUANTISED
from torch_fattn import CacheFullError, CacheStep, StaticKVCache, reference

_Result = TypeVar("_Result")
BATCH, CAPACITY = 3, 20


class History:
    def __init__(self, seed: int, device: str) -> None:
        self.rng, self.device = random.Random(seed), device
        kv_format, is_latent = self.rng.choice(("auto", *QUANTISED)), self.rng.random() < 0.3
        dims = {"head_dim": 64, "value_dim": LATENT_DIM} if is_latent else {}
        self.dense = Dense(kv_format, is_latent, dims.get("head_dim", DIM))
        self.cache: StaticKVCache = static(device, kv_format=kv_format, latent=is_latent, **dims)
        self.faults = 0

    def is_dropped(self, step: CacheStep, counts: list[int]) -> bool:
        """After a failure between the layers, the step is dropped or finished; before, no other step has its
        sequences."""
        self.dense.append(self.cache, step, counts, self.device, layers=1)
        for sequence, length, count in zip(step.sequences, step.lengths, counts, strict=True):
            if count > 0 and 1 in self.cache._layers.written:
                words = rf"layer 1 .* sequence {sequence} .*; .* truncate\({sequence}, {length - count}\)"
                with pytest.raises(ValueError, match=words):
                    self.cache.extend([sequence], tokens=self.rng.randint(0, 1))
        if self.rng.random() < 0.5:
            return False
        for sequence, length, count in zip(step.sequences, step.lengths, counts, strict=True):
            self.call(self.cache.truncate, sequence, length - count)
        return True

    def call(self, function: Callable[..., _Result], *arguments: Any, **keywords: Any) -> _Result:
        before = self.state()

        def check_unchanged() -> None:
            assert self.state() == before

        ops = range(self.rng.randrange(3), 1000, 3)
        result, failures = with_faults(lambda: function(*arguments, **keywords), check_unchanged, ops)
        self.faults += failures
        return result

    def state(self) -> Any:
        return self.cache.lengths

    def run(self, actions: int) -> None:
        cache, dense, rng = self.cache, self.dense, self.rng
        for sequence in range(BATCH):
            dense.tokens[sequence] = [[] for _ in range(LAYERS)]
        for _ in range(actions):
            action = rng.choice(("extend", "extend", "extend", "truncate", "fork", "reset"))
            one, other = rng.sample(range(BATCH), 2)
            if action == "extend":
                self.extend()
            elif action == "truncate":
                length = rng.randint(0, cache.lengths[one])
                self.call(cache.truncate, one, length)
                dense.truncate(one, length)
            elif action == "fork" and cache.lengths[other] > 0:
                with pytest.raises(ValueError, match=f"sequence {other} has .* tokens; reset\\(\\) it first"):
                    cache.fork(one, other)
            elif action == "fork":
                self.call(cache.fork, one, other)
                dense.fork(one, other)
            elif action == "reset":
                self.call(cache.reset, one)
                dense.truncate(one, 0)
            assert cache.lengths == tuple(len(dense.tokens[s][0]) for s in range(BATCH))
        self.call(cache.reset)
        assert cache.lengths == (0,) * BATCH and cache._tables.lengths.tolist() == [0] * BATCH

    def extend(self) -> None:
        cache, dense, rng = self.cache, self.dense, self.rng
        chosen = rng.sample(range(BATCH), rng.randint(1, BATCH))
        counts = [rng.choice((0, 1, 1, 2, 5)) for _ in chosen]
        given: Any = {"sequences": chosen, "tokens": counts}
        if rng.random() < 0.5:
            chosen = list(range(BATCH))
            counts = rng.choice(([1] * BATCH, [rng.choice((0, 1, 3)) for _ in chosen]))
            given = {"tokens": counts}
        if any(cache.lengths[s] + n > CAPACITY for s, n in zip(chosen, counts, strict=True)):
            before = self.state()
            with pytest.raises(CacheFullError, match="and the capacity is 20; make the cache larger"):
                cache.extend(**given)
            assert self.state() == before
            return
        step = self.call(cache.extend, **given)
        if rng.random() < 0.3 and self.is_dropped(step, counts):
            return
        dense.append(cache, step, counts, self.device)
        dense.check(cache, step, self.device, rows=min(counts) or 1)
        query = dense.rows(sum(counts), HEADS, dense.dim)
        out = cache.prefill(1, step, query.to(self.device), is_causal=True).cpu()
        for own, result, s in zip(query.split(counts), out.split(counts), chosen, strict=True):
            if len(own):
                key, value = (torch.stack(side, 1)[None] for side in zip(*dense.tokens[s][1], strict=True))
                exact, _ = reference.prefill(own.transpose(0, 1)[None], key, value, is_causal=True)
                assert torch.allclose(result.double(), exact[0].transpose(0, 1), atol=1e-5)


@pytest.mark.parametrize("seed", range(60))
def test_history(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every format, some with values in the keys. Also with FATTN_CHECK=1, which finds no slot that was
    never written."""
    monkeypatch.setenv("FATTN_CHECK", str(int(seed % 4 == 0)))
    history = History(seed, "mps" if seed % 20 == 0 else "cpu")
    history.run(30)
    assert history.faults > 40


@pytest.mark.host_only
def test_the_order_of_paged_caches() -> None:
    """Sequences first: a call with the number of tokens first raises, whatever the numbers are."""
    cache = static("cpu")
    for wrong in ((1,), ([1, 2, 0],), (1, [0]), ([1, 0], [0, 1])):
        with pytest.raises(TypeError, match=r"^StaticKVCache\.extend"):
            cache.extend(*wrong)
    assert cache.lengths == (0, 0, 0)
    step = cache.extend([2, 0], tokens=[3, 1])
    assert cache.lengths == (1, 0, 3)
    assert repr(step) == "CacheStep(sequences=(2, 0), lengths=(3, 1), max_seqlen_q=3, shared_blocks=0)"


@pytest.mark.host_only
def test_repr() -> None:
    cache = static("cpu")
    cache.extend(tokens=(2, 0, 1))
    assert repr(cache) == (
        "StaticKVCache(2 layers of 2 key-value heads, keys of 32 and values of 64 columns, "
        "torch.float32 on cpu, 3 sequences of up to 20 tokens; 3 tokens)"
    )


@pytest.mark.host_only
def test_a_fork_between_two_layers() -> None:
    """What the second layer then appends to the source is not in the copy."""
    cache = static("cpu")
    step = cache.extend([0], tokens=2)
    key, value = (torch.zeros(2, KV_HEADS, dim) for dim in (DIM, VALUE_DIM))
    cache.append(0, step, key, value)
    cache.fork(0, 1)
    cache.append(1, step, key, value)
    cache.extend([0], tokens=1)
    with pytest.raises(ValueError, match=r"layer 1 does not .* sequence 1 from position 0 on"):
        cache.extend([1], tokens=1)
