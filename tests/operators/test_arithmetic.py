"""Results are right with every permitted arithmetic: without contraction of a * b + c, and with the largest
errors that Metal's specification allows.

softmetal reads these settings from the environment, so the problems run in separate processes.
"""

from __future__ import annotations

import hashlib
import os

import pytest

from tests.conftest import needs_emulator
from tests.helpers import cache_problems, drawing, logits_problems, problems
from tests.helpers.accuracy import assert_close
from tests.helpers.processes import run_python
from tests.helpers.small_problems import run
from tests.operators.test_cache_write import written

pytestmark = needs_emulator

ARITHMETICS: dict[str, dict[str, str]] = {
    "uncontracted": {"SOFTMETAL_CONTRACT": "0"},
    "worst": {"SOFTMETAL_FAST_MATH": "worst"},
}


def check_results() -> str:
    """Checks problems of every operator and dtype, and returns a digest of the bits."""
    digest = hashlib.sha256()
    every = {(problem.op, problem.dtype): problem for problem in drawing.draw(600)}
    for problem in every.values():
        case = problems.build(problem)
        out, lse = run(case, "mps")
        assert_close(case, out, lse)
        digest.update(lse.numpy().tobytes())
    for logits in map(logits_problems.build, logits_problems.draw(11)):
        logits.assert_close(logits.run("mps"))
    for write in map(cache_problems.build, cache_problems.draw(5)):
        cache_problems.assert_written(write, written(write, "mps"))
    return digest.hexdigest()


def digest_with(variables: dict[str, str]) -> str:
    done = run_python(["-m", "tests.operators.test_arithmetic"], env={**os.environ, **variables})
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def default() -> str:
    return digest_with({})


@pytest.mark.parametrize("name", ARITHMETICS)
def test_results_are_right_and_differ(name: str, default: str) -> None:
    assert digest_with(ARITHMETICS[name]) != default


if __name__ == "__main__":
    print(check_results())
