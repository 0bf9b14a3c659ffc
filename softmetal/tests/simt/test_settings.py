"""Settings from the environment."""

from __future__ import annotations

import subprocess
import sys

import pytest

PRINT_SETTINGS = """
from softmetal.simt import harness
runtime = harness._runtime()
settings = runtime.softmetal_current_settings().contents
print(settings.threads, settings.order, settings.seed, settings.checks)
print(settings.tensor_layout, settings.tensor_seed)
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
    assert done.stdout.splitlines()[0] == expected
    assert complaint in done.stderr and bool(done.stderr) == bool(complaint)


@pytest.mark.parametrize(
    ("layout", "family", "expected", "complaint"),
    [
        ("", "", "1 0", ""),
        ("", "9", "1 0", ""),
        ("", "10", "0 0", ""),
        ("m5", "", "0 0", ""),
        ("blocks8", "10", "1 0", ""),
        ("random:18446744073709551615", "10", "2 18446744073709551615", ""),
        ("m4", "10", "0 0", "SOFTMETAL_TENSOR_LAYOUT is 'm4'"),
        ("random", "", "1 0", "SOFTMETAL_TENSOR_LAYOUT is 'random'"),
        ("random:x", "", "1 0", "SOFTMETAL_TENSOR_LAYOUT is 'random:x'"),
    ],
)
def test_layout_of_cooperative_tensors(layout: str, family: str, expected: str, complaint: str) -> None:
    environment = {"SOFTMETAL_TENSOR_LAYOUT": layout, "SOFTMETAL_GPU_FAMILY": family}
    command = [sys.executable, "-c", PRINT_SETTINGS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[1] == expected
    assert complaint in done.stderr and bool(done.stderr) == bool(complaint)
