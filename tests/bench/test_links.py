"""`python -m bench distributed`: a model of several Macs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import bench.__main__ as bench
from bench.cases.calls import Call
from bench.models import links
from bench.models.links import CALLS, LINKS, MACS, seconds
from torch_fattn.inspection.chips import CHIPS

pytestmark = pytest.mark.host_only

CHIP = CHIPS[0]
DECODE, PREFILL = CALLS[0], CALLS[-1]
FASTEST = replace(LINKS[0], gigabits=1e9, latency_us=0.0)


def by_keys(call: Call, chip: Any, compiles: bool = False) -> tuple[float, None]:
    return call.q_len * call.kv_len * 1e-9, None


@pytest.fixture(autouse=True)
def simple(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "predicted", by_keys)


@pytest.mark.parametrize("call", [DECODE, PREFILL])
def test_the_work_is_shared_if_links_cost_nothing(call: Call) -> None:
    alone = seconds(call, 1, FASTEST, CHIP)
    assert alone is not None
    for macs in MACS:
        assert seconds(call, macs, FASTEST, CHIP) == pytest.approx(alone / macs, rel=1e-3)


def test_a_slow_link_costs_its_bytes() -> None:
    """Two Macs pass a shard of keys: half of them, in 16 bits."""
    slow = replace(FASTEST, gigabits=1e-3)
    time = seconds(PREFILL, 2, slow, CHIP)
    shard = PREFILL.kv_len / 2 * 8 * 2 * 128 * 2
    assert time == pytest.approx(shard / (1e6 / 8), rel=0.01)


def test_latency_hides_behind_the_attention_of_a_decode() -> None:
    own = DECODE.kv_len / 2 * 1e-9
    late = replace(FASTEST, latency_us=own * 1e6 / 2)
    assert seconds(DECODE, 2, late, CHIP) == pytest.approx(1.5 * own, rel=1e-3)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["distributed", "--chip", "M2Ultra"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("A model, not a measurement: M2 Ultra")
    assert all(printed.count(link.name) >= len(CALLS) for link in LINKS)
