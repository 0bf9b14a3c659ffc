from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.tensor_machines import BACKWARD, Machines, Run, verdicts


@pytest.fixture(scope="session")
def machines() -> Iterator[Machines]:
    """Simulated machines with matrix units."""
    started = Machines()
    yield started
    started.stop()


@pytest.fixture(scope="session")
def passed(machines: Machines, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verdicts")
    run = machines.run(folder, Run([{}, {"dim": 96}, {"call": BACKWARD}]))
    assert [*run.states.values()].count("registers") == len(verdicts(folder)) == 3, run.doctor
    return folder


@pytest.fixture
def tested(passed: Path, tmp_path: Path) -> Path:
    """A folder with verdicts of an M5 that passed: in float16, of both calls with heads of 64 and of prefills
    with 96."""
    return shutil.copytree(passed, tmp_path, dirs_exist_ok=True)
