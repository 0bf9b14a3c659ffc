"""bench/models/aims.py: each aim is met by a record just above it, and missed by one just below."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.cases.calls import Call
from bench.cases.shapes import SHAPES
from bench.models import aims
from tests.helpers.command_line import refusal_of

pytestmark = pytest.mark.host_only

READ = 1000.0  # GB/s
WANTED = {131072: 0.85, 32768: 0.72, 8192: 0.88}


def row(call: Call, share: float, impl: str = "fattn") -> dict[str, Any]:
    fields = ("op", "batch", "q_heads", "kv_heads", "head_dim", "q_len", "kv_len", "causal", "dtype")
    return {
        **{name: getattr(call, name) for name in fields},
        "impl": impl,
        "call": str(call),
        "options": call.options,
        "ms_median": call.least_bytes / READ / share / 1e6,
        "ceiling_fraction": share,
        "rate": share,
    }


def record(change: float = 1.0) -> dict[str, Any]:
    """Everything 2 % better than wanted, times `change`; a peer 1 % behind on every plain call."""
    rows = []
    for call in SHAPES["decode"]:
        share = 1.02 * WANTED.get(call.kv_len, 0.75) * change
        if call.block_size:
            share *= 0.95
        elif call.kv_format:  # half the bytes
            share *= 1.7 / 2 * 1.01
        elif call.lengths:
            share = 1.02 * change / 1.3
        rows.append(row(call, share))
        if not call.options:
            rows.append(row(call, share / 1.01, "torch-metal"))
    return {"rows": rows}


def missed(found: dict[str, Any]) -> list[str]:
    return [verdict.aim for verdict in aims.decode(found["rows"]) if not verdict.met]


def test_a_good_record_meets_every_aim() -> None:
    assert missed(record()) == []
    assert len(list(aims.decode(record()["rows"]))) == 13 + 12


def test_a_record_a_little_slower_misses_the_shares() -> None:
    lengths = ["decode B1 N=131072", "decode B1 N=32768", "decode B16 N=8192", "one sequence of 65536 and 15"]
    slow = missed(record(0.97))
    assert [aim.startswith(start) for aim, start in zip(slow, lengths, strict=True)] == [True] * 4


@pytest.mark.parametrize(
    ("aim", "which"),
    [
        ("pages of 16", {"op": "paged_decode"}),
        ("int8 cache", {"options": {"kv_format": "int8"}}),
        ("one sequence of 65536", {"batch": 16, "kv_len": 65536}),
        ("D=96", {"head_dim": 96}),
        ("group of 16", {"kv_heads": 2}),
        ("N=256: time of torch-metal", {"kv_len": 256}),
    ],
)
def test_each_aim_can_be_missed(aim: str, which: dict[str, Any]) -> None:
    slow = record()
    for one in slow["rows"]:
        if one["impl"] == "fattn" and all(one[name] == value for name, value in which.items()):
            one["ms_median"] *= 1.4
            one["ceiling_fraction"] /= 1.4
    assert any(aim in sentence for sentence in missed(slow))


def test_a_refused_call_misses_its_aim() -> None:
    found = record()
    for one in found["rows"]:
        if one["head_dim"] == 256:
            one["refused"] = "no kernel"
    assert [sentence for sentence in missed(found) if "D=256" in sentence]


def prefill_record(change: float = 1.0) -> dict[str, Any]:
    """Everything 2 % better than wanted, times `change`."""
    share = 1.02 * change
    rows = []
    for call in SHAPES["prefill"]:
        rate = share if call.head_dim == 128 else share * aims.RELATIVE_RATE.get(call.head_dim, 1.0)
        ours = row(call, 0.70 * share) | {"ms_median": 1.0, "rate": rate}
        short = call.kv_len == 512
        wide = call.head_dim in aims.WIDE
        rows += [ours, ours | {"impl": "fattn-m1", "ms_median": 1.0 if short or wide else 1.8 / 1.3}]
        rows += [ours | {"impl": "mlx-metal", "ms_median": (1.5 if short else 1.8) * share}]
        rows += [ours | {"impl": "torch-metal", "ms_median": 9.0}]
        rows += [ours | {"impl": "llama-metal", "ms_median": share if wide else 8.0}]
    return {"rows": rows}


def missed_by_prefill(found: dict[str, Any]) -> list[str]:
    return [verdict.aim for verdict in aims.prefill(found["rows"]) if not verdict.met]


def test_a_good_record_meets_every_aim_of_prefill() -> None:
    assert missed_by_prefill(prefill_record()) == []


def test_a_record_a_little_slower_misses_the_shares_of_prefill() -> None:
    slow = missed_by_prefill(prefill_record(0.97))
    # Of 26 calls ours, and what M1 runs but for the two short ones; of 18 with wide heads ours and what M1
    # runs; products beside D=128 stay the same.
    assert len(slow) == 26 + 24 + 12 + 2 * 18
    assert sum("time of llama-metal" in aim for aim in slow) == 2 * 18
    assert sum("share of the products" in aim for aim in slow) == 12


@pytest.mark.parametrize(
    ("aim", "which"),
    [
        ("over fattn-m1", {"impl": "fattn-m1", "dtype": "bfloat16"}),
        ("2048x2048 bfloat16: time of mlx-metal over fattn", {"impl": "fattn", "dtype": "bfloat16"}),
        ("16/16x256 8192x8192: time of llama-metal over fattn", {"impl": "fattn", "q_heads": 16}),
        ("8/8x512 2048x2048 bfloat16: time of llama-metal over fattn-m1", {"impl": "fattn-m1", "q_heads": 8}),
        ("D=80", {"impl": "fattn", "head_dim": 80}),
        ("D=512", {"impl": "fattn", "head_dim": 512}),
    ],
)
def test_each_aim_of_prefill_can_be_missed(aim: str, which: dict[str, Any]) -> None:
    slow = prefill_record()
    for one in slow["rows"]:
        if all(one[name] == value for name, value in which.items()):
            one["ms_median"] *= 1.4
            one["rate"] /= 1.4
    assert any(aim in sentence for sentence in missed_by_prefill(slow))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "record.json"
    path.write_text(json.dumps(record()))
    assert aims.main([str(path), "--of", "decode"]) == 0
    assert "all 25 aims are met" in capsys.readouterr().out
    path.write_text(json.dumps(record(0.97)))
    assert aims.main([str(path), "--of", "decode"]) == 1
    assert "4 of 25 aims are missed" in capsys.readouterr().out
    both = {"rows": [*record()["rows"], *prefill_record()["rows"]]}
    path.write_text(json.dumps(both))
    assert aims.main([str(path)]) == 0
    capsys.readouterr()
    path.write_text("{}")
    assert "is not a record of the bench" in refusal_of(aims.main, [str(path)], capsys)
