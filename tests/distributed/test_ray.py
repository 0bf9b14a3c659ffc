"""Ray actors as ranks: nothing of the package knows of Ray."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.helpers.documents import PYTHONPATH
from torch_fattn import distributed, reference
from torch_fattn.distributed import Shards

ray: Any = pytest.importorskip("ray", reason="Ray is not installed")
pytestmark = pytest.mark.host_only

RANKS, LENGTH = 2, 40


def operands() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, heads, LENGTH, 32, generator=generator) for heads in (4, 2, 2)]


class Rank:
    def attend(self, rank: int, store: str) -> Tensor:
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
        shards = Shards.zigzag(LENGTH, RANKS)
        own = [shards.take(operand, 2, rank) for operand in operands()]
        out = distributed.prefill(*own, is_causal=True, shards=shards)
        return distributed.unshard(out, 2, shards)


def test_actors(tmp_path: Any) -> None:
    environment = {"PYTHONPATH": os.pathsep.join((PYTHONPATH, *sys.path))}
    ray.init(num_cpus=RANKS, include_dashboard=False, runtime_env={"env_vars": environment})
    try:
        actors = [ray.remote(Rank).options(num_cpus=1).remote() for _ in range(RANKS)]
        store = (tmp_path / "store").as_uri()
        outs = ray.get([actor.attend.remote(rank, store) for rank, actor in enumerate(actors)], timeout=120)
    finally:
        ray.shutdown()
    exact = reference.prefill(*operands(), is_causal=True)[0]
    assert all(torch.equal(out, outs[0]) and torch.allclose(out.double(), exact, atol=1e-5) for out in outs)
