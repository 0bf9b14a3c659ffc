"""The budget of kernel modules, on tests in another folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import needs_emulator

ROOT = Path(__file__).resolve().parents[2]
TWIN = """
import pytest
from softmetal.testing import Library

SOURCE = "kernel void f(device int* x [[buffer(0)]]) { *x = %d; }\\n"
Library(SOURCE % 10)

@pytest.mark.parametrize("number", [*range(8), 3])
def test_kernel(number, tmp_path):
    path = tmp_path / "f.metal"
    path.write_text(SOURCE % number)
    Library(path)

@pytest.mark.rotating
def test_of_a_third(tmp_path):
    test_kernel(9, tmp_path)
"""


@needs_emulator
@pytest.mark.parametrize(("recorded", "status"), [(3, 1), (4, 0)])
def test_a_folder_that_compiles_more_fails(recorded: int, status: int, tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels/test_twin.py").write_text(TWIN)
    record = tmp_path / "modules.txt"
    record.write_text(f"kernels {recorded} test_twin={recorded}\n")
    options = "-n 1 -p no:cacheprovider -p tests.tiers -p tests.budget --modules check --modules-file".split()
    command = [sys.executable, "-m", "pytest", *options, str(record), "--rootdir", str(tmp_path)]
    done = subprocess.run([*command, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == status and "10 passed" in done.stdout, done.stdout + done.stderr
    over = "kernels requests 9 kernel modules, 3 are recorded and 8 allowed (test_twin +6)"
    assert (over in done.stdout) == (status == 1)
