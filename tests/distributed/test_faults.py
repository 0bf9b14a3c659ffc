"""What survivors see when a rank ends, stalls, or passes something else: an error with the name of the call,
within the timeout. Nothing hangs, and caches stay whole."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import torch_fattn
from tests.distributed.pool import EndedError, Pool, World, error_of, pool
from tests.helpers.documents import PYTHONPATH
from tests.helpers.processes import run_python
from tests.helpers.tensors import same_bits
from torch_fattn import StaticKVCache, distributed
from torch_fattn.distributed import Shards
from torch_fattn.distributed.planner import METHODS

pytestmark = pytest.mark.host_only

TIMEOUT = 3.0  # seconds, of the groups that lose a rank
RANKS, FAULTY = 3, 1


@dataclass(frozen=True)
class Seen:
    error: str
    seconds: float
    is_whole: bool  # whether the cache still has its tokens


def cache_of(world: World) -> tuple[StaticKVCache, Any]:
    cache = StaticKVCache(1, 2, 16, 2, 32, dtype=torch.float32, device="cpu")
    step = cache.extend(tokens=[5, 3])
    tokens = torch.randn(8, 2, 32, generator=torch.Generator().manual_seed(world.rank))
    cache.append(0, step, tokens, tokens)
    return cache, step


def decode_with_fault(world: World, fault: str) -> Seen:
    """A decode over every rank's cache, in which rank FAULTY has the fault."""
    cache, step = cache_of(world)
    before = (cache.lengths, cache.keys(0).clone(), step.seq_lens.clone())
    query = torch.ones(2, 4, 1, 32)
    if world.rank == FAULTY:
        if fault == "ends":
            os._exit(1)
        if fault == "stalls":
            time.sleep(TIMEOUT + 2)
        query = {"other shape": torch.ones(2, 8, 1, 32), "refused": query.double()}.get(fault, query)
    start = time.monotonic()
    options: dict[str, Any] = {"group": world.group}
    if fault == "other options" and world.rank == FAULTY:
        options["window_left"] = 3
    if fault == "other shards":
        options["shards"] = Shards.round_robin(48, RANKS, 1 + (world.rank == FAULTY))
    if fault == "other call" and world.rank == FAULTY:
        key = cache.keys(0)
        error = error_of(distributed.prefill, query, key, key, query_shards="replicated", **options)
    elif fault == "other method":
        rows, method = torch.ones(2, 3, 4, 32), ("heads" if world.rank == FAULTY else "ring")
        error = error_of(distributed.prefill, rows, rows, rows, method=method, **options)
    elif fault.startswith("unshard"):
        error = error_of(unshard_with_fault, world, fault)
    else:
        operands = query, cache.keys(0), cache.values(0), step.seq_lens * RANKS
        error = error_of(distributed.decode, *operands, **options)
    seconds = time.monotonic() - start
    same = same_bits(cache.keys(0), before[1]) and torch.equal(step.seq_lens, before[2])
    return Seen(error, seconds, cache.lengths == before[0] and same)


def unshard_with_fault(world: World, fault: str) -> None:
    """gloo ends a process that receives other sizes than it expects."""
    shards, own = Shards.contiguous(3 * RANKS, RANKS), torch.ones(4, 3, 32)
    if world.rank == FAULTY:
        changed = {"unshard other shape": own[:2], "unshard refused": own[:, :2]}
        own = changed.get(fault, own.double())
    distributed.unshard(own, 1, shards, world.group)


@pytest.fixture
def fragile() -> Iterator[Pool]:
    with pool(RANKS, timeout=TIMEOUT) as made:
        yield made


@pytest.mark.parametrize("fault", ["ends", "stalls"])
def test_a_lost_rank(fragile: Pool, fault: str) -> None:
    assert all(not seen.error for seen in fragile.run(RANKS, decode_with_fault, "")), "the control"
    outcomes = fragile.outcomes(RANKS, decode_with_fault, fault)
    lost = outcomes.pop(FAULTY)
    assert isinstance(lost, EndedError) if fault == "ends" else "RuntimeError" in lost.error
    for seen in outcomes:
        assert seen.error.startswith("RuntimeError: torch_fattn.distributed.decode: rank "), seen.error
        assert f"of {RANKS} lost the others: a rank ended, or stalled beyond" in seen.error
        assert "\n" not in seen.error and seen.seconds < TIMEOUT + 1 and seen.is_whole


DIFFERENT = {
    "other shape": ("ValueError", "rank 0 and rank 1 pass different query heads: 4 and 8"),
    "other options": ("ValueError", "rank 0 and rank 1 pass different options"),
    "other shards": ("ValueError", "rank 0 and rank 1 pass different shards"),
    "other call": ("RuntimeError", "rank 0 and rank 1 call different functions"),
    "other method": ("ValueError", "rank 0 and rank 1 pass different options"),
    "refused": ("RuntimeError", "rank 1 refused its own arguments"),
    "unshard other shape": ("ValueError", "rank 0 and rank 1 pass different other dimensions"),
    "unshard other dtype": ("ValueError", "rank 0 and rank 1 pass different dtype"),
    "unshard refused": ("RuntimeError", "rank 1 refused its own arguments"),
}
CALLS = {"other method": "prefill", **{fault: "unshard" for fault in DIFFERENT if "unshard" in fault}}


@pytest.mark.parametrize("fault", DIFFERENT)
def test_a_rank_that_passes_something_else(ranks: Pool, fault: str) -> None:
    kind, words = DIFFERENT[fault]
    seen = ranks.run(RANKS, decode_with_fault, fault)
    own = seen.pop(FAULTY)
    if fault == "unshard refused":
        assert own.error.startswith("ValueError: torch_fattn.distributed.unshard: dimension 1 of shape")
    elif fault == "refused":
        assert own.error.startswith("TypeError: torch_fattn.distributed.decode: ") and "float64" in own.error
    else:
        assert f"{kind}: torch_fattn.distributed." in own.error
    for each in seen:
        name = f"torch_fattn.distributed.{CALLS.get(fault, 'decode')}"
        assert each.error.startswith(f"{kind}: {name}: {words}"), each.error
        assert "\n" not in each.error and each.seconds < 5 and each.is_whole
    assert all(not each.error for each in ranks.run(RANKS, decode_with_fault, "")), "the group still works"


def end_in_a_ring(world: World) -> str:
    """Rank FAULTY ends when it would pass on what it received."""
    shift, own = distributed.exchange.Exchange.shift, torch.ones(1, 2, 64, 32)

    def ending(self: Any, leaving: Tensor | None, arriving: int, like: Tensor) -> Any:
        if leaving is not None and not torch.equal(leaving, leaving.new_full(leaving.shape, FAULTY)):
            os._exit(1)
        return shift(self, leaving, arriving, like)

    if world.rank == FAULTY:
        distributed.exchange.Exchange.shift = ending  # type: ignore[method-assign]
    return error_of(distributed.prefill, *[own * world.rank] * 3, group=world.group, method="ring")


def test_a_rank_that_ends_in_a_ring(fragile: Pool) -> None:
    outcomes = fragile.outcomes(RANKS, end_in_a_ring)
    assert isinstance(outcomes.pop(FAULTY), EndedError)
    for error in outcomes:
        assert error.startswith("RuntimeError: torch_fattn.distributed.prefill: rank ")
        assert "lost the others" in error


def outlive(world: World, closes: bool) -> float:
    """Rank 1 ends after a good call. The others catch what they see and stay alive, and rank 3 waits for one
    of them."""
    own = torch.ones(1, 2, 8, 32)
    options: dict[str, Any] = {"group": world.group, "is_causal": True, "shards": Shards.contiguous(32, 4)}
    distributed.prefill(own, own, own, **options)
    if world.rank == FAULTY:
        os._exit(1)
    if not closes:
        distributed.exchange.Exchange._leave = lambda self: None  # type: ignore[method-assign]
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="lost the others"):
        distributed.prefill(own, own, own, **options)
    return time.monotonic() - start


@pytest.mark.parametrize("closes", [True, False], ids=["", "twin"])
def test_no_rank_waits_for_a_survivor(closes: bool) -> None:
    """The twin leaves its connections open, and a rank waits for the timeout."""
    with pool(4, timeout=TIMEOUT) as made:
        seconds = [each for each in made.outcomes(4, outlive, closes) if not isinstance(each, EndedError)]
    assert len(seconds) == 3 and (max(seconds) < TIMEOUT / 2) == closes, seconds


def test_without_a_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    own = torch.ones(1, 4, 8, 32)
    with pytest.raises(RuntimeError, match="^torch_fattn.distributed.prefill: there is no process group"):
        torch_fattn.distributed.prefill(own, own, own)


WITHOUT = """
import torch, torch.distributed as dist
for name in ("GroupMember", "P2POp", "all_gather", "get_rank"):
    delattr(dist, name)
dist.is_available = lambda: False
import torch_fattn
own = torch.ones(1, 4, 8, 32)
print(torch_fattn.distributed.explain("prefill", own, own, own, ranks=2).data["method"])
try:
    torch_fattn.distributed.prefill(own, own, own)
except NotImplementedError as error:
    print(error)
"""


def test_a_torch_without_distributed() -> None:
    """The package can be imported, and calls name what is missing."""
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
    done = run_python(["-c", WITHOUT], env=environment, timeout=100)
    assert done.returncode == 0, done.stderr
    method, error = done.stdout.splitlines()
    assert method in METHODS
    assert error.startswith(
        "torch_fattn.distributed.prefill: this torch was built without torch.distributed; "
    )
