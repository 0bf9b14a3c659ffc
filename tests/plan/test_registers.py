"""The registers that csrc/plan/registers.h counts by hand, against those of Mesa's compiler for M1 and M2 in
bench/results/agx.json. The compiler is not needed: rows of other kernels than today's are left out."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from typing import Any

import pytest
import torch

import torch_fattn
from bench.backends import agx
from bench.backends.record import read
from bench.peers.launch import OURS
from bench.report.agx import RESULTS

pytestmark = pytest.mark.host_only

TOLERANCE = 16  # halves: less than a step of Mesa's table of threads by registers, near 208


def counted(recorded: list[dict[str, Any]]) -> dict[str, tuple[int, int]]:
    """Call -> by hand and by the compiler, in the hot loop, of each kernel without options."""
    digests = {(row["call"], row["shape"]): row["digest"] for row in recorded}
    loops = {row["digest"]: row["loop_needed"] for row in recorded if "loop_needed" in row}
    entries = [entry for entry in agx.entries() if entry.impl == OURS and entry.part == "plain"]
    entries = [entry for entry in entries if entry.facts["by_hand"]]
    fresh = [entry for entry in entries if digests.get((entry.call, entry.shape)) == entry.digest]
    if len(fresh) < len(entries) / 2:
        warnings.warn(
            f"most rows of {RESULTS.name} are stale: run `python -m bench agx --update`", stacklevel=1
        )
    return {entry.call: (entry.facts["by_hand"], loops[entry.digest]) for entry in fresh}


def far(numbers: Mapping[str, tuple[int, int]], more: int = 0) -> list[str]:
    return [
        f"{call}: {hand + more} by hand, {mesa} by Mesa's compiler"
        for call, (hand, mesa) in numbers.items()
        if abs(hand + more - mesa) > TOLERANCE
    ]


def test_registers_by_hand() -> None:
    pytest.importorskip("softmetal.testing.agx", reason="kernels are known by the version of its compiler")
    numbers = counted([row for row in read(RESULTS)["rows"] if row["impl"] == OURS])
    assert not far(numbers)
    for wrong in (-2 * TOLERANCE - 1, 2 * TOLERANCE + 1):  # the control
        assert len(far(numbers, wrong)) == len(numbers)


def shown(text: str) -> tuple[int, int]:
    """The total of the first pass, and the sum of its parts."""
    total, parts = re.findall(r"~(\d+) half registers per lane \(estimate\): (.*)", text)[0]
    return int(total), sum(map(int, re.findall(r"\w+ (\d+)", parts)))


@pytest.mark.parametrize(("dim", "family", "missing"), [(128, 7, "scores"), (64, 7, "staged"), (128, 9, "")])
def test_explain_shows_what_is_held_at_once(dim: int, family: int, missing: str) -> None:
    query = key = torch.empty(1, 8, 1024, dim, dtype=torch.float16, device="meta")
    plan = torch_fattn.explain("prefill", query, key, key, family=family, cores=8)
    parts = plan.passes[0]["registers"]
    rest = parts["query"] + parts["out"] + parts["state"] + parts["rest"]
    step = parts["scores"] + parts["operands"]  # with early loads, while the next one is staged
    assert parts["total"] == rest + (max(step, parts["staged"]) if missing else step + parts["staged"])
    total, of_parts = shown(plan.details)
    assert total == of_parts == parts["total"]
    assert {"scores", "staged"} - set(plan.details.split()) == ({missing} if missing else set())
    assert shown(plan.details.replace("query ", "query 1"))[1] != total, "the control"
