"""csrc/plan and the gate of the self-test, in C++: plan_test.cpp, compiled without torch, and faults that it
detects."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.helpers.plan_program import PlanProgram

CSRC = Path(__file__).resolve().parents[2] / "csrc"
pytestmark = pytest.mark.host_only


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> PlanProgram:
    main = Path(__file__).with_name("plan_test.cpp")
    return PlanProgram(CSRC, main, tmp_path_factory.mktemp("plan"))


def faults(program: Path) -> list[str]:
    done = subprocess.run([program], capture_output=True, text=True)
    assert done.returncode == bool(done.stdout)
    return done.stdout.splitlines()


def test_plans(built: PlanProgram) -> None:
    assert faults(built.link()) == []


@pytest.mark.parametrize(
    ("source", "old", "new", "place"),
    [
        ("plan/explain.cpp", "if (c == '\"' || c == '\\\\') text_ += '\\\\';", "", "explain"),
        ("selftest/gate.cpp", "constexpr int kFirst = 17;", "constexpr int kFirst = 16;", "gates of tensor"),
    ],
)
def test_a_change_is_noticed(
    source: str, old: str, new: str, place: str, built: PlanProgram, tmp_path: Path
) -> None:
    original = CSRC / source
    text = original.read_text()
    assert text.count(old) == 1
    changed = tmp_path / original.name
    changed.write_text(text.replace(old, new).replace('#include "', f'#include "{original.parent}/'))
    assert any(place in line for line in faults(built.link(changed)))
