"""300 random problems of each function, on 1 to 4 ranks with uneven and empty shards: right by the accuracy
rule, and the same bits on every rank. Some of them on "mps", with the checks of softmetal."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.pool import Pool, pool
from tests.distributed.random_problems import MOST_RANKS, OPS, check, draw

PROBLEMS = 300
CHUNKS = 10
ON_GPU = 6
GPU_RANKS = 2  # each compiles its kernels


@pytest.fixture(scope="module")
def ranks() -> Iterator[Pool]:
    with pool(MOST_RANKS) as made:
        yield made


@pytest.fixture(scope="module")
def gpu_ranks() -> Iterator[Pool]:
    with pool(GPU_RANKS, device="mps") as made:
        yield made


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
    launches = [check(gpu_ranks, sharded, checked=True) for sharded in draw(op, ON_GPU, GPU_RANKS)]
    assert all(launches), "each problem launches the kernels"
