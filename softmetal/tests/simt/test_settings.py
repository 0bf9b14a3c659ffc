"""Settings from the environment."""

from __future__ import annotations

import subprocess
import sys

import pytest

PRINT_SETTINGS = """
import ctypes
from softmetal.simt import harness
runtime = harness._runtime()
runtime.softmetal_current_settings.restype = ctypes.POINTER(harness._Settings)
settings = runtime.softmetal_current_settings().contents
print(settings.threads, settings.order, settings.seed, settings.checks)
"""


@pytest.mark.parametrize(
    ("environment", "expected", "complaint"),
    [
        ({}, "0 0 0 0", ""),
        ({"SOFTMETAL_CHECK": "1"}, "0 0 0 31", ""),
        ({"SOFTMETAL_CHECK": "race,uninit", "SOFTMETAL_THREADS": "3"}, "3 0 0 5", ""),
        ({"SOFTMETAL_CHECK": "0", "SOFTMETAL_ORDER": "reverse"}, "0 1 0 0", ""),
        ({"SOFTMETAL_ORDER": "random:42"}, "0 2 42 0", ""),
        ({"SOFTMETAL_CHECK": "race,typo"}, "0 0 0 1", "names an unknown check, 'typo'"),
        ({"SOFTMETAL_ORDER": "sideways"}, "0 0 0 0", "is 'sideways'"),
    ],
    ids=str,
)
def test_environment(environment: dict[str, str], expected: str, complaint: str) -> None:
    command = [sys.executable, "-c", PRINT_SETTINGS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == expected
    assert complaint in done.stderr and bool(done.stderr) == bool(complaint)
