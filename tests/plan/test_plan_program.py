"""The gate of matrix units in C++: plan_test.cpp, compiled with csrc/plan and without torch."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).resolve().parents[2] / "csrc"
COMPILER = os.environ.get("CXX") or shutil.which("clang++") or shutil.which("clang++-19") or "c++"
GATE = CSRC / "selftest" / "gate.cpp"


def faults(gate: Path, folder: Path) -> list[str]:
    sources = [Path(__file__).with_name("plan_test.cpp"), CSRC / "plan" / "tuned.cpp", gate]
    program = folder / "program"
    command = [*COMPILER.split(), "-std=c++20", "-Wall", "-Werror", f"-I{CSRC}", f"-I{CSRC}/selftest"]
    subprocess.run([*command, *map(str, sources), "-o", str(program)], check=True)
    return subprocess.run([program], capture_output=True, text=True, check=True).stdout.splitlines()


@pytest.mark.host_only
def test_gates(tmp_path: Path) -> None:
    assert faults(GATE, tmp_path) == []
    text, first = GATE.read_text(), "constexpr int kFirst = 17;"
    assert text.count(first) == 1
    changed = tmp_path / GATE.name
    changed.write_text(text.replace(first, first.replace("17", "16")))
    assert len(faults(changed, tmp_path)) == 2, "the control"
