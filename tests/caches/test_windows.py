"""PagedKVCache with a window whose blocks are released."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.cache_classes import DIM, HEADS, KV_HEADS, LAYERS, paged


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
