"""300 random problems of each function, on 1 to 4 ranks with uneven and empty shards: right by the accuracy
rule, and the same bits on every rank. Some of them on "mps", with the checks of softmetal."""

from __future__ import annotations

import dataclasses
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.distributed.pool import Pool, World
from tests.distributed.random_problems import OPS, Result, Sharded, check, draw, run
from torch_fattn.distributed import Shards
from torch_fattn.distributed.exchange import Exchange

PROBLEMS = 300
CHUNKS = 10
ON_GPU = 6


def _check_chunk(made: Pool, op: str, chunk: int) -> None:
    for sharded in draw(op, PROBLEMS)[chunk::CHUNKS]:
        check(made, sharded)


@pytest.mark.host_only
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_decode(ranks: Pool, chunk: int) -> None:
    _check_chunk(ranks, "decode", chunk)


@pytest.mark.host_only
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_paged_decode(ranks: Pool, chunk: int) -> None:
    _check_chunk(ranks, "paged_decode", chunk)


@pytest.mark.host_only
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_prefill(ranks: Pool, chunk: int) -> None:
    _check_chunk(ranks, "prefill", chunk)


@pytest.mark.host_only
@pytest.mark.parametrize("chunk", range(3))
def test_varlen_prefill(ranks: Pool, chunk: int) -> None:
    for sharded in draw("varlen_prefill", 90)[chunk::3]:
        check(ranks, sharded)


@pytest.mark.parametrize("op", OPS)
def test_on_gpu(gpu_ranks: Pool, op: str) -> None:
    launches = [check(gpu_ranks, sharded, True) for sharded in draw(op, ON_GPU, 2)]
    assert all(launches), "each problem launches the kernels"


def without_exchange(world: World, sharded: Sharded) -> Result:
    """The same of ranks that take their own part for those of all."""
    gather = Exchange.gather

    def own(self: Exchange, tensor: Tensor) -> Tensor:
        return gather(self, tensor) if tensor.dtype == torch.int64 else torch.stack([tensor] * self.ranks)

    with mock.patch.object(Exchange, "gather", own):
        return run(world, sharded)


@pytest.mark.host_only
def test_control(ranks: Pool) -> None:
    drawn = (each for each in draw("decode", 20) if each.problem.seq_lens is None and each.shards.ranks > 1)
    sharded = next(each for each in drawn if all(each.shards.runs))
    check(ranks, sharded)
    with pytest.raises(AssertionError, match="has other bits"):
        check(ranks, sharded, function=without_exchange)
    alone = dataclasses.replace(sharded, shards=Shards.sizes([sharded.shards.length]))
    check(ranks, alone, function=without_exchange)
