"""PagedKVCache in random histories of calls, against a simple model in Python."""

from __future__ import annotations

import copy
import random

import pytest
import torch

from tests.helpers.cache_classes import paged, same, snapshot
from torch_fattn import CacheFullError, PagedKVCache

pytestmark = pytest.mark.host_only


class Model:
    """A model of a paged cache: a sequence is its length and its blocks, lists of tokens. Shared blocks are
    one list, in which a longer sequence may have more tokens."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.chains: dict[int, list[list[int]]] = {}
        self.lengths: dict[int, int] = {}

    def used(self) -> int:
        return len({id(block) for chain in self.chains.values() for block in chain})

    def allocate(self, sequence: int) -> None:
        self.chains[sequence], self.lengths[sequence] = [], 0

    def fork(self, source: int, copy: int) -> None:
        self.chains[copy], self.lengths[copy] = list(self.chains[source]), self.lengths[source]

    def free(self, sequence: int) -> None:
        del self.chains[sequence], self.lengths[sequence]

    def truncate(self, sequence: int, length: int) -> None:
        self.lengths[sequence] = length
        del self.chains[sequence][-(-length // self.block_size) :]

    def extend(self, tokens: dict[int, list[int]]) -> bool:
        """False, and nothing changed, if there are too few blocks."""
        before = copy.deepcopy((self.chains, self.lengths))
        for sequence, new in tokens.items():
            for token in new:
                self._append(sequence, token)
        if self.used() > self.num_blocks:
            self.chains, self.lengths = before
            return False
        return True

    def _append(self, sequence: int, token: int) -> None:
        chain, filled = self.chains[sequence], self.lengths[sequence] % self.block_size
        if filled == 0:
            chain.append([])
        elif sum(any(block is chain[-1] for block in other) for other in self.chains.values()) > 1:
            chain[-1] = chain[-1][:filled]
        del chain[-1][filled:]
        chain[-1].append(token)
        self.lengths[sequence] += 1

    def tokens(self, sequence: int) -> list[int]:
        return [token for block in self.chains[sequence] for token in block][: self.lengths[sequence]]


@pytest.mark.parametrize("seed", range(12))
def test_random_use(seed: int) -> None:
    """Every key in the cache is its token's number, so the pool shows which tokens a sequence holds."""
    rng = random.Random(seed)
    block_size = rng.choice((1, 3, 4, 16))
    num_blocks = rng.choice((5, 12, 40))
    sizes = {"num_blocks": num_blocks, "block_size": block_size, "max_sequences": 6}
    cache = paged("cpu", num_layers=1, num_kv_heads=1, head_dim=8, value_dim=8, **sizes)
    model, next_token, full = Model(num_blocks, block_size), 0, 0
    for _ in range(120):
        alive = list(cache.sequences)
        action = rng.choice(("allocate", "fork", "free", "truncate", *["extend"] * 4))
        if action == "allocate" and len(alive) < 6:
            model.allocate(cache.allocate())
        elif action == "fork" and alive and len(alive) < 6:
            source = rng.choice(alive)
            model.fork(source, cache.fork(source))
        elif action == "free" and alive and rng.random() < 0.6:
            gone = rng.choice(alive)
            cache.free(gone)
            model.free(gone)
        elif action == "truncate" and alive:
            cut = rng.choice(alive)
            length = rng.randint(0, cache.length(cut))
            cache.truncate(cut, length)
            model.truncate(cut, length)
        elif action == "extend" and alive:
            chosen = rng.sample(alive, rng.randint(1, len(alive)))
            counts = [rng.choice((0, 1, 1, 2, rng.randint(0, 2 * block_size))) for _ in chosen]
            tokens: dict[int, list[int]] = {}
            for sequence, count in zip(chosen, counts, strict=True):
                tokens[sequence] = list(range(next_token, next_token + count))
                next_token += count
            before, free = snapshot(cache), cache.free_blocks
            needed = cache.blocks_needed(chosen, counts)
            if not model.extend(tokens):
                with pytest.raises(CacheFullError):
                    cache.extend(chosen, counts)
                assert same(snapshot(cache), before) and needed > free
                full += 1
                continue
            step = cache.extend(chosen, counts)
            assert cache.free_blocks == free - needed
            rows = torch.tensor([t for new in tokens.values() for t in new], dtype=torch.float32)
            cache.append(0, step, *[rows[:, None, None].expand(-1, 1, 8)] * 2)
        check_against(cache, model)
    for sequence in cache.sequences:
        cache.free(sequence)
    assert cache.free_blocks == num_blocks and not cache._pool._users
    assert sorted(cache._pool._free) == list(range(num_blocks)) and len(set(cache._tables._free_rows)) == 6
    assert full > 0 or num_blocks * block_size > 100


def check_against(cache: PagedKVCache, model: Model) -> None:
    assert set(cache.sequences) == model.chains.keys()
    assert cache.free_blocks == model.num_blocks - model.used()
    assert cache.stats.tokens == sum(model.lengths.values())
    key, value = cache._layers.operands(0)
    for sequence in cache.sequences:
        expected = model.tokens(sequence)
        assert cache.length(sequence) == len(expected)
        row = cache._sequences[sequence].row
        blocks = cache.blocks(sequence)
        assert cache._tables.blocks[row, : len(blocks)].tolist() == list(blocks)
        assert int(cache._tables.lengths[row]) == len(expected)
        for pool in (key, value):
            stored = pool[list(blocks)].flatten(0, 1)[: len(expected), 0, 0] if blocks else torch.empty(0)
            assert stored.tolist() == expected
