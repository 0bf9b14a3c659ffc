"""Prefixes of a PagedKVCache, found by their tokens, and blocks behind a window, which it releases."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.cache_classes import DIM, HEADS, KV_HEADS, LAYERS, VALUE_DIM, paged
from tests.helpers.synchronisations import Synchronisations
from torch_fattn import CacheFullError, CacheStep, PagedKVCache

PROMPT = list(range(50, 63))  # three blocks of four, and a token


def append(cache: PagedKVCache, step: CacheStep) -> CacheStep:
    for layer in range(LAYERS):
        rows = [step.seq_lens.new_zeros(len(step.positions), KV_HEADS, d).float() for d in (DIM, VALUE_DIM)]
        cache.append(layer, step, *rows)
    return step


def prompted(cache: PagedKVCache, token_ids: list[int]) -> tuple[int, int]:
    """A sequence with these tokens, and how many were found."""
    sequence = cache.allocate(token_ids)
    found = cache.length(sequence)
    append(cache, cache.extend([sequence], len(token_ids) - found))
    cache.commit(sequence, token_ids)
    return sequence, found


@pytest.mark.host_only
@pytest.mark.parametrize(
    ("token_ids", "found"),
    [
        (PROMPT, 12),
        (PROMPT[:12], 8),  # the last token is left
        ([*PROMPT[:8], 0, 0, 0, 0, 0], 8),
        ([0, *PROMPT[1:]], 0),
        (PROMPT[4:], 0),  # the same block at another place
        (PROMPT[:1], 0),
        ([], 0),
    ],
)
def test_found_prefixes(token_ids: list[int], found: int) -> None:
    cache = paged("cpu")
    prompted(cache, PROMPT)
    assert prompted(cache, token_ids)[1] == found
    looked = max(len(token_ids) - 1, 0) // 4
    assert (cache.stats.prefix_hits, cache.stats.prefix_misses) == (found // 4, 3 + looked - found // 4)


@pytest.mark.host_only
def test_the_least_recently_used_is_evicted() -> None:
    """And the end of a prefix before its beginning. Blocks in use are never evicted."""
    cache = paged("cpu", num_blocks=8)
    a, b = [1] * 9, [2] * 9
    for prompt in (a, b, a):  # a is the newer one
        cache.free(prompted(cache, prompt)[0])
    assert cache.free_blocks == 8 and cache.stats.cached_blocks == 4 and cache.stats.evictions == 0
    user = cache.allocate()
    append(cache, cache.extend([user], 20))  # four that nothing is in, and one
    assert cache.stats.evictions == 1 and cache.free_blocks == 3
    assert [cache.length(cache.allocate(prompt)) for prompt in (b, a)] == [4, 8]
    with pytest.raises(CacheFullError, match="1 blocks of 4 tokens are needed and 0 of 8 are free"):
        cache.extend([user])
    assert cache.stats.evictions == 1 and cache.stats.cached_blocks == 3


@pytest.mark.host_only
def test_cleared_prefixes() -> None:
    """What was computed before is registered no more, not even behind newer blocks."""
    cache = paged("cpu")
    old, _ = prompted(cache, PROMPT[:9])
    cache.clear_prefixes()
    assert cache.length(cache.allocate(PROMPT)) == 0 and cache.stats.cached_blocks == 0
    append(cache, cache.extend([old], 4))
    cache.commit(old, PROMPT)
    prompted(cache, PROMPT[:9])
    assert cache.length(cache.allocate(PROMPT)) == 8


@pytest.mark.host_only
def test_released_blocks_of_a_window() -> None:
    cache = paged("cpu", window_left=4)
    sequence = cache.allocate()
    for tokens in (12, 1):
        append(cache, cache.extend([sequence], tokens))
    assert cache.blocks(sequence)[:2] == (-1, 4 - 3) and cache.free_blocks == 12 - 3
    with pytest.raises(ValueError, match=r"rows after 7 tokens .* keep at least 9 tokens, or none"):
        cache.truncate(sequence, 7)
    cache.truncate(sequence, 9)
    cache.truncate(sequence, 0)
    assert cache.free_blocks == 12
    step = append(cache, cache.extend([sequence], 1))
    query = torch.zeros(1, HEADS, 1, DIM)
    for attend, rows in ((cache.decode, query), (cache.prefill, query[0].transpose(0, 1))):
        for options in ({"window_left": 5}, {"sink_tokens": 1}):
            with pytest.raises(ValueError, match=r"is not \d, for which the cache keeps blo"):
                attend(0, step, rows, **options)
        attend(0, step, rows, window_left=4)


@pytest.mark.host_only
def test_a_prefix_behind_a_window() -> None:
    """The window needs only the last blocks of a prefix."""
    cache = paged("cpu", window_left=5, sink_tokens=1)
    tokens = list(range(25))
    first = cache.allocate(tokens)
    for count in (16, 8):
        append(cache, cache.extend([first], count))
        cache.commit(first, tokens)
    second = cache.allocate(tokens)
    assert cache.length(second) == 24
    assert cache.blocks(second) == (cache.blocks(first)[0], -1, -1, -1, *cache.blocks(first)[4:])


@pytest.mark.host_only
def test_a_fork_copies_no_more_than_its_own_blocks() -> None:
    """Its cost does not grow with the pool."""

    class Copies(TorchDispatchMode):
        most = 0

        def __torch_dispatch__(self, op: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
            if op is torch.ops.aten.copy_.default:
                self.most = max(self.most, arguments[0].numel())
            return op(*arguments, **(keywords or {}))

    cache = paged("cpu", num_blocks=1000)
    one, _ = prompted(cache, PROMPT)
    with Copies() as copies:
        two = cache.fork(one)
    assert copies.most == 4 and cache.blocks(two) == cache.blocks(one)


def test_nothing_waits() -> None:
    cache = paged(window_left=40, num_blocks=40)
    with Synchronisations() as found:
        one, _ = prompted(cache, PROMPT)
        two, _ = prompted(cache, PROMPT)
        step = append(cache, cache.extend([one, two], [4, 6]))
        cache.fork(one)
        cache.accept(step, [[1, 3], [0, 5]])
        step = append(cache, cache.extend([two, one, cache.allocate()], [3, 1, 1]))
        cache.decode(0, step, torch.zeros(3, HEADS, 1, DIM, device="mps"), shared_prefix=True)
        cache.truncate(one, 14)
        cache.clear_prefixes()
        append(cache, cache.extend([one], 40))
        append(cache, cache.extend([one], 40))
    assert found.ops == [] and cache.blocks(one)[0] == -1
    with Synchronisations() as found:
        cache.swap_out(one)
    assert found.ops, "the control"
