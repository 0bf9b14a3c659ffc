"""Other people's libraries, unmodified, on mps with install(): fetched when this runs, with random weights.

Slow, and needs a package index: without one they are skipped, with the reason.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.third_party.cases import CASES
from tests.third_party.run import PACKAGES

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).parent / "packages.txt"
# Both sides are errors of whole models, in which the same roundings add up in other ways.
TIMES, PLUS = 2.0, 2e-6


@pytest.fixture(scope="session")
def packages() -> Path:
    """A folder of its own, kept between runs; the list is the stamp."""
    folder = ROOT / "out" / f"third_party-{sys.version_info.major}.{sys.version_info.minor}"
    stamp = folder / "packages.txt"
    if not stamp.exists() or stamp.read_text() != LIST.read_text():
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade"]
        done = subprocess.run(
            [*install, "--target", str(folder), "-r", str(LIST)], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            pytest.skip(f"the packages cannot be installed: {done.stderr.strip().splitlines()[-1]}")
        stamp.write_text(LIST.read_text())
    return folder


def test_every_case_has_its_package() -> None:
    assert list(PACKAGES) == list(CASES) and len({package for package, _ in PACKAGES.values()}) >= 10


@pytest.mark.parametrize("case", CASES)
def test_unmodified(case: str, packages: Path) -> None:
    command = [sys.executable, "-m", "tests.third_party.run", str(packages), case]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    assert result["routed"] == result["calls"] > 0, result["fallbacks"]
    assert result["launches"] >= result["routed"] and not result["installed_after"]
    assert result["error"] <= TIMES * result["torch_error"] + PLUS * max(1.0, result["size"]), result
    assert result["size"] > 0, "the control: the model computes something"
