"""Threadgroups of a decode have even shares of the keys, however uneven the sequences are
(csrc/kernels/common/schedule.h): each is run alone, and its products are counted."""

from __future__ import annotations

import pytest
import torch

from tests.conftest import needs_emulator
from tests.helpers import direct_launch

pytestmark = needs_emulator

CORES = 8  # of the plans below: 24 threadgroups at a time
EVEN = 16 * [2048]
LONG_FIRST = [20000, *14 * [512]]


def products_of_threadgroups(lengths: list[int], drop_the_deal: bool = False) -> list[int]:
    batch, capacity, head_dim = len(lengths), max(lengths), 8
    arguments = {
        "query": torch.randn(batch, 3, 1, head_dim, dtype=torch.float16),
        "key": torch.randn(batch, 1, 1, head_dim, dtype=torch.float16).expand(-1, -1, capacity, -1),
        "value": torch.randn(batch, 1, 1, head_dim, dtype=torch.float16).expand(-1, -1, capacity, -1),
        "seq_lens": torch.tensor(lengths, dtype=torch.int32),
    }
    if lengths == batch * [capacity]:
        del arguments["seq_lens"]
    plan = direct_launch.plan_of("decode", arguments)
    step = plan["passes"][0]
    direct_launch.cut_into_slices(step, 1)
    buffers = direct_launch.buffers_of("decode", arguments, plan)

    def without_deal(text: str) -> str:
        assert text.count("keys > kLargeChunk") == 1
        return text.replace("keys > kLargeChunk", "false")

    mutate = without_deal if drop_the_deal else None
    return [counters["products"] for counters in direct_launch.launches(step, buffers, mutate, checks="")]


def unevenness(products: list[int]) -> float:
    return max(products) / (sum(products) / len(products))


@pytest.mark.parametrize(
    "lengths",
    [
        EVEN,
        [*EVEN, 2047],
        3 * [30000],
        [6000],
        LONG_FIRST,
        LONG_FIRST[::-1],
        [20000, 16000, 13000, *12 * [700]],
        [30000, *45 * [90]],
    ],
    ids=["even", "ragged", "even-long", "one", "long-first", "long-last", "three-long", "many-short"],
)
def test_shares_are_even(lengths: list[int]) -> None:
    products = products_of_threadgroups(lengths)
    assert len(products) == 24
    assert unevenness(products) <= 1.25


def test_a_long_sequence_cut_into_runs_would_be_late() -> None:
    """The control."""
    assert unevenness(products_of_threadgroups(LONG_FIRST, drop_the_deal=True)) > 1.5
