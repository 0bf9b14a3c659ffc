"""PagedKVCache in random histories of all its methods, each with memory running out at every op, against a
dense model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.cache_histories import KINDS, History
from torch_fattn import PagedKVCache
from torch_fattn.caches import tables
from torch_fattn.caches.blocks import BlockPool
from torch_fattn.caches.memory import Layers
from torch_fattn.caches.tables import StepTensors, Tables, fill

HISTORIES = 20  # of each kind
continued, last_step = Tables.continued, PagedKVCache._continued


def run(kind: str, seed: int, device: str = "cpu") -> History:
    history = History(kind, seed, device)
    history.run(40)
    return history


@pytest.mark.host_only
@pytest.mark.parametrize("seed", range(HISTORIES))
@pytest.mark.parametrize("kind", KINDS)
def test_history(kind: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with FATTN_CHECK=1, which finds no slot that was never written."""
    monkeypatch.setenv("FATTN_CHECK", str(int(seed % 4 == 0)))
    assert run(kind, seed).faults > 30


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", KINDS)
def test_history_on_mps(kind: str, seed: int) -> None:
    assert run(kind, seed, "mps").faults > 30


def move_without_restoring(layers: Layers, sources: Sequence[int], targets: Sequence[int]) -> None:
    size = layers.operands(0)[0].shape[1]
    index = [[each // size, each % size] for each in map(torch.tensor, (sources, targets))]
    for memory in layers.tensors():
        memory[tuple(index[1])] = memory[tuple(index[0])]


def fill_without_slots(out: Tensor, numbers: Sequence[int]) -> None:
    if out.dtype != torch.int64 or out.storage_offset() == 0:  # not of `continued`
        fill(out, numbers)


def continued_with_old_table(own: Tables, last: StepTensors, *arguments: Any) -> StepTensors:
    return continued(own, last, *arguments)._replace(block_tables=last.block_tables)


# What the cache may forget: an owner, its attribute, and a wrong one.
MISTAKES: dict[str, tuple[Any, str, Any]] = {
    "forget": (BlockPool, "forget", lambda pool, block: None),
    "register unfilled": (PagedKVCache, "_filled_length", lambda cache, sequence: sequence.length),
    "interrupted": (PagedKVCache, "_check_filled", lambda *_: None),
    "restore": (Layers, "move", move_without_restoring),
    "rows": (PagedKVCache, "_check_window", lambda *_: None),
    "stale": (Tables, "begin", lambda tables, sequences: None),
    "slots of an entered block": (tables, "fill", fill_without_slots),
    "its entry": (Tables, "continued", continued_with_old_table),
    "changed": (PagedKVCache, "_continued", lambda own, a, _, b: last_step(own, a, [], b)),
    "lengths": (Tables, "lengths", property(lambda own: own._lengths)),
    "copy": (BlockPool, "users", lambda pool, block: min(pool._users.get(block, 0), 1)),
}


@pytest.mark.host_only
@pytest.mark.parametrize("of", MISTAKES)
def test_a_mistake_is_noticed(of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: the histories fail."""
    monkeypatch.setattr(*MISTAKES[of])
    with pytest.raises((AssertionError, KeyError, pytest.fail.Exception)):
        for kind in KINDS:
            for seed in range(HISTORIES):
                run(kind, seed)
