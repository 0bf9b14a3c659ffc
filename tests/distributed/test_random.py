"""300 random problems of each function, most of those of varlen_prefill in the sweep alone, on 1 to 4 ranks
with uneven and empty shards: right by the accuracy rule, and the same bits on every rank. Some of them on
"mps", with the checks of softmetal."""

from __future__ import annotations

import dataclasses
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.distributed.pool import Failure, Pool, World
from tests.distributed.random_problems import OPS, Result, Sharded, check, draw, run
from torch_fattn import distributed
from torch_fattn.distributed import Shards
from torch_fattn.distributed.exchange import Exchange

PROBLEMS = 300
CHUNKS = 10
ON_GPU = 6


@pytest.mark.host_only
@pytest.mark.parametrize("chunk", range(CHUNKS))
@pytest.mark.parametrize("op", OPS)
def test_right_and_alike(ranks: Pool, op: str, chunk: int) -> None:
    """Few of varlen_prefill, where a problem has a ring of launches for each sequence."""
    for sharded in draw(op, 90 if op == "varlen_prefill" else PROBLEMS)[chunk::CHUNKS]:
        check(ranks, sharded)


@pytest.mark.host_only
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_more_varlen_prefills(ranks: Pool, chunk: int) -> None:
    for sharded in draw("varlen_prefill", PROBLEMS)[chunk::CHUNKS]:
        check(ranks, sharded)


@pytest.mark.parametrize("op", OPS)
def test_on_gpu(gpu_ranks: Pool, op: str) -> None:
    launches = [check(gpu_ranks, sharded, True) for sharded in draw(op, ON_GPU, 2)]
    assert all(launches), "each problem launches the kernels"


def one_row_of_each(world: World, method: str) -> tuple[Tensor, Tensor]:
    """Every rank has one row, and its own row of the mask. Out, and what it should be."""
    query, key, value = torch.randn(3, 1, 4, 2, 32, generator=torch.Generator().manual_seed(0))
    mask, own = torch.eye(2, dtype=torch.bool), slice(world.rank, world.rank + 1)
    operands = (operand[:, :, own] for operand in (query, key, value))
    out = distributed.prefill(*operands, mask[own], group=world.group, method=method)
    return out, value[:, :, own]


@pytest.mark.host_only
def test_one_row_of_each_rank(ranks: Pool) -> None:
    for method in ("auto", "ring"):
        for out, exact in ranks.run(2, one_row_of_each, method):
            torch.testing.assert_close(out, exact)
    for failure in ranks.outcomes(2, one_row_of_each, "heads"):
        assert isinstance(failure, Failure) and "the attn_mask may differ between rows" in failure.text


def without_exchange(world: World, sharded: Sharded) -> Result:
    """The same of ranks that take their own part for those of all."""
    gather = Exchange.gather

    def own(self: Exchange, tensor: Tensor) -> Tensor:
        return gather(self, tensor) if tensor.dtype == torch.int64 else torch.stack([tensor] * self.ranks)

    with mock.patch.object(Exchange, "gather", own):
        return run(world, sharded)


@pytest.mark.host_only
def test_control(ranks: Pool) -> None:
    drawn = (each for each in draw("decode", PROBLEMS) if each.problem.seq_lens is None)
    sharded = next(each for each in drawn if each.shards.ranks > 1 and all(each.shards.runs))
    check(ranks, sharded)
    with pytest.raises(AssertionError, match="has other bits"):
        check(ranks, sharded, function=without_exchange)
    alone = dataclasses.replace(sharded, shards=Shards.sizes([sharded.shards.length]))
    check(ranks, alone, function=without_exchange)
