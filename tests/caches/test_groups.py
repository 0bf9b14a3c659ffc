"""Sequences in several groups, each with a prefix of its own, in one decode."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from tests.conftest import counted_launches
from tests.helpers.cache_classes import DIM, HEADS, Dense, paged
from torch_fattn import PagedKVCache, reference
from torch_fattn.caches.groups import find_groups


def grown(device: str) -> tuple[PagedKVCache, Dense, dict[str, list[int]]]:
    """Prefixes of 12 and 8 tokens with 4 and 3 sequences, and two sequences alone."""
    cache, dense = paged(device, num_blocks=64), Dense()
    families: dict[str, list[int]] = {}
    for name, tokens, members in (("a", 12, 4), ("b", 8, 3), ("x", 6, 1), ("y", 5, 1)):
        first = cache.allocate()
        dense.append(cache, cache.extend([first], tokens), [tokens], device)
        families[name] = [first, *(cache.fork(first) for _ in range(members - 1))]
        for other in families[name][1:]:
            dense.fork(first, other)
    return cache, dense, families


@pytest.mark.host_only
@pytest.mark.parametrize("seed", range(30))
def test_random_groups(seed: int) -> None:
    """Every member begins with the group's blocks, everyone is in one group, and no pair shares more that
    is not read once."""
    rng = random.Random(seed)
    tables: list[list[int]] = [[]]
    for _ in range(rng.randint(0, 12)):
        table = rng.choice(tables)
        keep = rng.randint(0, len(table))
        fresh = 1 + max((block for each in tables for block in each), default=0)
        tables.append(table[:keep] + list(range(fresh, fresh + rng.randint(0, 4))))
    groups = find_groups(tables)
    assert sorted(n for group in groups for n in group.members) == list(range(len(tables)))
    for group in groups:
        assert len({tuple(tables[n][: group.blocks]) for n in group.members}) == 1
        assert all(len(tables[n]) >= group.blocks for n in group.members)
    together: dict[int, list[int]] = {}
    for n, table in enumerate(tables):
        if table:
            together.setdefault(table[0], []).append(n)
    for members in together.values():
        common = next(
            k
            for k in range(99)
            if len({tuple(tables[n][: k + 1]) for n in members}) > 1
            or any(len(tables[n]) <= k for n in members)
        )
        saved = sum(group.saved for group in groups if {*group.members} <= {*members})
        assert saved >= (len(members) - 1) * common


@pytest.mark.parametrize("device", ["cpu", "mps"])
@pytest.mark.parametrize("options", [{}, {"rows": 2}, {"window_left": 6, "sink_tokens": 1}], ids=str)
def test_several_groups(options: dict[str, Any], device: str) -> None:
    """In an order that mixes the groups, against the float64 reference."""
    cache, dense, families = grown(device)
    rows = options.get("rows", 1)
    a, b = families["a"], families["b"]
    batch = [a[0], b[0], *families["x"], a[1], a[2], b[1], *families["y"], b[2], a[3]]
    step = cache.extend(batch, rows)
    dense.append(cache, step, [rows] * len(batch), device)
    given = {name: value for name, value in options.items() if name != "rows"}
    dense.check(cache, step, device, rows=rows, exact_options=given, shared_prefix=True, **given)
    groups = cache._find_groups(step, rows)
    assert [(group.members, group.blocks) for group in groups] == [
        ([0, 3, 4, 8], 3),
        ([1, 5, 7], 2),
        ([2, 6], 0),
    ]


@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_options_of_each_sequence(device: str) -> None:
    cache, dense, families = grown(device)
    batch = [families["a"][0], families["b"][0], families["a"][1], families["b"][1], *families["x"]]
    step = cache.extend(batch, 2)
    dense.append(cache, step, [2] * 5, device)
    query = torch.randn(5, HEADS, 2, DIM)
    capacity = step.block_tables.shape[1] * 4
    options: dict[str, Any] = {
        "attn_mask": torch.rand(5, 1, 2, capacity) < 0.7,
        "tree_mask": torch.tensor([[1, 3]] * 2 + [[1, 2]] * 3),
        "alibi_slopes": torch.rand(5, HEADS) / 8,
    }
    on = {name: value.to(device) for name, value in options.items()}
    plain = {"return_lse": True, "token_major_out": True}
    out, lse = cache.decode(0, step, query.to(device), shared_prefix=True, **plain, **on)
    assert out.transpose(1, 2).is_contiguous()
    for b, sequence in enumerate(batch):
        key, value = (torch.stack(side, 1)[None] for side in zip(*dense.tokens[sequence][0], strict=True))
        own = {name: value[b : b + 1] for name, value in options.items()}
        own["attn_mask"] = own["attn_mask"][..., : key.shape[2]]
        exact, exact_lse = reference.decode(query[b : b + 1], key, value, **own)
        assert torch.allclose(out[b].cpu().double(), exact[0], atol=1e-5)
        assert torch.allclose(lse[b].cpu().double(), exact_lse[0].double(), atol=1e-5)


def test_bits_and_launches() -> None:
    """A sequence's bits do not depend on other groups, however long those are."""
    cache, dense, families = grown("mps")
    long = cache.allocate()
    dense.append(cache, cache.extend([long], 70), [70], "mps")
    batch = [*families["a"], *families["b"], *families["x"], long]
    step = cache.extend(batch, 1)
    dense.append(cache, step, [1] * len(batch), "mps")
    query = torch.randn(len(batch), HEADS, 1, DIM, device="mps")
    whole = cache.decode(0, step, query, shared_prefix=True)
    for name in "ab":
        places = [batch.index(sequence) for sequence in families[name]]
        own = cache.extend(families[name], 0)
        with counted_launches() as launches:
            alone = cache.decode(0, own, query[places[0] : places[-1] + 1], shared_prefix=True)
        assert torch.equal(alone, whole[places[0] : places[-1] + 1])
    single = sum(launches.values())
    with counted_launches() as launches:
        cache.decode(0, step, query, shared_prefix=True)
    with counted_launches() as plain:
        cache.decode(0, cache.extend([*families["x"], long], 0), query[-2:])
    assert sum(launches.values()) <= 2 * single + sum(plain.values())
