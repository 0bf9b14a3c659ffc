"""The tests on a machine that has no GPU: each passes, or skips with a reason. On one whose GPU cannot run
the kernels, such as a hosted runner, `make test-all` runs them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import needs_emulator
from tests.tiers import HOSTED_RUNNER

ROOT = Path(__file__).resolve().parents[2]

TWIN = """
import pytest
import torch
import torch_fattn

def run():
    query = torch.ones(1, 1, 1, 8).to("mps")
    return torch_fattn.decode(query, query, query)

@pytest.fixture(scope="module")
def result():
    return run()

def test_that_needs_a_gpu(result):
    assert result is not None

@pytest.mark.host_only
def test_marked_host_only():
    run()

@pytest.mark.host_only
def test_with_a_fixture_that_needs_one(result):
    pass
"""


def outcomes(environment: dict[str, str], *arguments: str) -> tuple[dict[str, int], str]:
    """Tests by outcome, and the output of pytest."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "--tb=short"]
    done = subprocess.run(
        [*command, *arguments], cwd=ROOT, env=os.environ | environment, capture_output=True, text=True
    )
    last = done.stdout.rstrip().rpartition("\n")[2]
    found = {name.rstrip("s"): int(count) for count, name in re.findall(r"(\d+) ([a-z]+)", last)}
    assert (done.returncode == 0) == (not found.keys() & {"failed", "error"}), done.stdout + done.stderr
    return found, done.stdout


@needs_emulator
def test_a_failure_would_be_noticed(tmp_path: Path) -> None:
    """Two tests that are wrongly marked; the first one skips before its fixture tries to use the GPU."""
    (tmp_path / "test_twin.py").write_text(TWIN)
    twin = ["-p", "tests.conftest", "--rootdir", str(tmp_path), str(tmp_path)]
    found, message = outcomes(HOSTED_RUNNER, *twin)
    assert {name: found[name] for name in ("skipped", "failed", "error")} == dict.fromkeys(
        ("skipped", "failed", "error"), 1
    ), message
    found, message = outcomes({}, *twin)
    assert found["passed"] == 3, message


@needs_emulator
@pytest.mark.parametrize(("environment", "there"), [({"SOFTMETAL": "0"}, "False"), ({}, "True")], ids=str)
def test_the_software_gpu_can_be_kept_out(environment: dict[str, str], there: str) -> None:
    """Though the extension is linked against it."""
    asks = "import torch, torch_fattn; print(torch.backends.mps.is_available())"
    command = [sys.executable, "-c", asks]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=True)
    assert done.stdout == f"{there}\n"
