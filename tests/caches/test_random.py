"""PagedKVCache in random sequences of allocate, extend, fork and free, against a simple model in Python."""

from __future__ import annotations

import random

import pytest
import torch

from tests.helpers.cache_classes import paged, same, snapshot
from torch_fattn import CacheFullError, PagedKVCache

pytestmark = pytest.mark.host_only


class Model:
    """A model of a paged cache, in which a sequence is a list of its tokens."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.chains: dict[int, list[list[int]]] = {}  # blocks of token numbers; shared ones are one list

    def used(self) -> int:
        return len({id(block) for chain in self.chains.values() for block in chain})

    def fork(self, source: int, copy: int) -> None:
        self.chains[copy] = list(self.chains[source])

    def extend(self, tokens: dict[int, list[int]]) -> bool:
        """False, and nothing changed, if there are too few blocks."""
        after = Model(self.num_blocks, self.block_size)
        after.chains = {sequence: list(chain) for sequence, chain in self.chains.items()}
        for sequence, new in tokens.items():
            chain = after.chains[sequence]
            for token in new:
                if not chain or len(chain[-1]) == self.block_size:
                    chain.append([])
                users = sum(any(block is chain[-1] for block in other) for other in after.chains.values())
                was_there = any(block is chain[-1] for other in self.chains.values() for block in other)
                if users > 1 or was_there:
                    chain[-1] = list(chain[-1])
                chain[-1].append(token)
        if after.used() > self.num_blocks:
            return False
        self.chains = after.chains
        return True

    def tokens(self, sequence: int) -> list[int]:
        return [token for block in self.chains[sequence] for token in block]


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
        action = rng.choice(("allocate", "fork", "free", "extend", "extend", "extend", "extend"))
        if action == "allocate" and len(alive) < 6:
            model.chains[cache.allocate()] = []
        elif action == "fork" and alive and len(alive) < 6:
            source = rng.choice(alive)
            model.fork(source, cache.fork(source))
        elif action == "free" and alive and rng.random() < 0.6:
            gone = rng.choice(alive)
            cache.free(gone)
            del model.chains[gone]
        elif action == "extend" and alive:
            chosen = rng.sample(alive, rng.randint(1, len(alive)))
            counts = [rng.choice((0, 1, 1, 2, rng.randint(0, 2 * block_size))) for _ in chosen]
            tokens: dict[int, list[int]] = {}
            for sequence, count in zip(chosen, counts, strict=True):
                tokens[sequence] = list(range(next_token, next_token + count))
                next_token += count
            before = snapshot(cache)
            if not model.extend(tokens):
                with pytest.raises(CacheFullError):
                    cache.extend(chosen, counts)
                assert same(snapshot(cache), before)
                full += 1
                continue
            step = cache.extend(chosen, counts)
            rows = torch.tensor([t for new in tokens.values() for t in new], dtype=torch.float32)
            cache.append(0, step, *[rows[:, None, None].expand(-1, 1, 8)] * 2)
        check_against(cache, model)
    for sequence in cache.sequences:
        cache.free(sequence)
    assert cache.free_blocks == num_blocks and not cache._users
    assert sorted(cache._free_blocks) == list(range(num_blocks)) and len(set(cache._free_rows)) == 6
    assert full > 0 or num_blocks * block_size > 300


def check_against(cache: PagedKVCache, model: Model) -> None:
    assert set(cache.sequences) == model.chains.keys()
    assert cache.free_blocks == model.num_blocks - model.used()
    key, value = cache._layers.operands(0)
    for sequence in cache.sequences:
        expected = model.tokens(sequence)
        assert cache.length(sequence) == len(expected)
        row = cache._sequences[sequence].row
        blocks = cache.blocks(sequence)
        assert cache._tables[row, : len(blocks)].tolist() == list(blocks)
        assert int(cache._seq_lens[row]) == len(expected)
        for pool in (key, value):
            stored = pool[list(blocks)].flatten(0, 1)[: len(expected), 0, 0] if blocks else torch.empty(0)
            assert stored.tolist() == expected
