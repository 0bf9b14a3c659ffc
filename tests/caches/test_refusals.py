"""Wrong use of StaticKVCache and PagedKVCache: refused in the cache's own words, and nothing is lost."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.cache_classes import (
    DIM,
    HEADS,
    KV_HEADS,
    VALUE_DIM,
    paged,
    same,
    snapshot,
    static,
)
from tests.helpers.kv_formats import QUANTISED
from torch_fattn import CacheStep, PagedKVCache, StaticKVCache


def test_freed_twice() -> None:
    cache = paged()
    sequence = cache.allocate()
    cache.extend([sequence], 5)
    cache.free(sequence)
    before = snapshot(cache)
    for use in (cache.free, cache.fork, cache.length, cache.blocks, lambda s: cache.extend([s])):
        with pytest.raises(ValueError, match=f"sequence {sequence} is not allocated"):
            use(sequence)
    assert same(snapshot(cache), before)
    assert cache.allocate() != sequence, "numbers do not come again"


@pytest.mark.host_only
@pytest.mark.parametrize("make", [static, paged])
def test_layers_that_are_not_used(make: Any) -> None:
    """A layer counts from its first token on: then it must have every token of a sequence."""
    cache = make("cpu", num_layers=3)
    first, other = (cache.allocate(), cache.allocate()) if make is paged else (0, 1)
    for _ in range(3):
        step = cache.extend([first], tokens=2)
        for layer in (0, 1):
            cache.append(layer, step, *new_rows(2, torch.ones(())))
    cache.append(2, cache.extend([other], tokens=1), *new_rows(1, torch.ones(())))
    with pytest.raises(ValueError, match=rf"extend: layer 2 .* sequence {first} from position 0 on"):
        cache.extend([first], tokens=1)
    cache = make("cpu")  # a first step that fails is noticed by the layer that it did not reach
    first = cache.allocate() if make is paged else 0
    for _ in range(2):
        step = cache.extend([first], tokens=2)
        cache.append(0, step, *new_rows(2, torch.ones(())))
    for call in (
        lambda: cache.append(1, step, *new_rows(2, torch.ones(()))),
        lambda: cache.decode(1, cache.extend([first], tokens=0), torch.zeros(1, HEADS, 1, DIM)),
    ):
        with pytest.raises(ValueError, match=rf"layer 1 .* position 0 on; .* truncate\({first}, 0\)"):
            call()
    cache.truncate(first, 0)
    step = cache.extend([first], tokens=1)
    for layer in (0, 1):
        cache.append(layer, step, *new_rows(1, torch.ones(())))
    cache.decode(1, step, torch.zeros(1, HEADS, 1, DIM))


@pytest.mark.parametrize("device", ["cpu", "mps"])
@pytest.mark.parametrize("kv_format", ["auto", *QUANTISED])
@pytest.mark.parametrize("make", [static, paged])
def test_a_read_of_an_unwritten_slot(
    make: Any, kv_format: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With FATTN_CHECK=1, whatever else lets it through."""
    cache = make(device, kv_format=kv_format)
    first = cache.allocate() if make is paged else 0
    like = torch.ones((), device=device)
    monkeypatch.setattr(type(cache), "_check_filled", lambda *_: None)
    monkeypatch.setenv("FATTN_CHECK", "1")
    for layers in ((0, 1), (0,), (0, 1)):
        step = cache.extend([first], tokens=3)
        for layer in layers:
            cache.append(layer, step, *new_rows(3, like))
    rows = like.new_zeros(3, HEADS, DIM)
    for call in (lambda layer: cache.decode(layer, step, rows), lambda n: cache.prefill(n, step, rows)):
        call(0)
        with pytest.raises(ValueError, match=rf"position 3 of sequence {first} was never written in layer 1"):
            call(1)
        with monkeypatch.context() as patch:
            patch.delenv("FATTN_CHECK")
            call(1)


@pytest.mark.host_only
@pytest.mark.parametrize("make", [static, paged])
def test_arguments_owned_by_the_cache(make: Any) -> None:
    cache = make("cpu", kv_format="int8")
    step, query = step_of(cache), torch.zeros(3, HEADS, DIM)
    names = ("kv_format", "key_scales", "value_scales")
    for name, method in itertools.product(names, (cache.decode, cache.prefill)):
        assert name not in inspect.signature(method).parameters
        with pytest.raises(TypeError, match=f"there is no option '{name}'"):
            method(0, step, query, **{name: None})


def step_of(cache: StaticKVCache | PagedKVCache) -> CacheStep:
    """A cache of three sequences, with a token each in layer 0."""
    if isinstance(cache, PagedKVCache):
        step = cache.extend([cache.allocate() for _ in range(3)], 1)
    else:
        step = cache.extend(tokens=1)
    cache.append(0, step, *new_rows(3, step.seq_lens.float()))
    return step


def new_rows(count: int, like: Tensor) -> list[Tensor]:
    return [like.new_zeros(count, KV_HEADS, dim) for dim in (DIM, VALUE_DIM)]


def test_a_fork_that_is_swapped_out_between_two_layers() -> None:
    """What its source then appends is not in the blocks to which it returns."""
    cache = paged("cpu")
    source = cache.allocate()
    step = cache.extend([source], 3)
    cache.append(0, step, *new_rows(3, step.seq_lens.float()))
    fork, swapped = cache.fork(source), cache.fork(source)
    cache.swap_out(swapped)
    cache.append(1, step, *new_rows(3, step.seq_lens.float()))
    cache.swap_in(swapped)
    cache.extend([source, fork])
    with pytest.raises(ValueError, match=rf"layer 1 does not .* sequence {swapped} from position 0 on"):
        cache.extend([swapped])
    cache.truncate(swapped, 0)
    cache.extend([swapped])


def test_a_quantised_cache_takes_rows_of_every_dtype() -> None:
    cache = static("cpu", kv_format="int8")
    step = step_of(cache)
    key, value = new_rows(3, torch.ones(()))
    cache.append(0, step, key.half(), value.half())
    cache.decode(0, step, torch.zeros(3, HEADS, 1, DIM, dtype=torch.bfloat16))
    with pytest.raises(TypeError, match=r"key is torch.float64 .* convert it with .to\(torch.float32\)"):
        cache.append(0, step, key.double(), value)
