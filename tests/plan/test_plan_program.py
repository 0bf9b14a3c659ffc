"""csrc/plan alone, in C++: plan_test.cpp, compiled without torch, and faults that it detects."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.helpers.plan_program import PlanProgram

PLAN = Path(__file__).resolve().parents[2] / "csrc" / "plan"
pytestmark = pytest.mark.host_only


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> PlanProgram:
    main = Path(__file__).with_name("plan_test.cpp")
    return PlanProgram(PLAN.parent, main, tmp_path_factory.mktemp("plan"))


def faults(program: Path) -> list[str]:
    done = subprocess.run([program], capture_output=True, text=True)
    assert done.returncode == bool(done.stdout)
    return done.stdout.splitlines()


def test_plans(built: PlanProgram) -> None:
    assert faults(built.link()) == []


@pytest.mark.parametrize(
    ("source", "old", "new", "place"),
    [
        ("explain.cpp", "if (c == '\"' || c == '\\\\') text_ += '\\\\';", "", "explain"),
        ("tensor_gate.cpp", "constexpr int kFirst = 17;", "constexpr int kFirst = 16;", "gates of tensor"),
    ],
)
def test_a_change_is_noticed(
    source: str, old: str, new: str, place: str, built: PlanProgram, tmp_path: Path
) -> None:
    text = (PLAN / source).read_text()
    assert text.count(old) == 1
    changed = tmp_path / source
    changed.write_text(text.replace(old, new).replace('#include "', f'#include "{PLAN}/'))
    assert any(place in line for line in faults(built.link(changed)))
