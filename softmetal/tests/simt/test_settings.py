"""Settings from the environment."""

from __future__ import annotations

import subprocess
import sys

import pytest

PRINT_SETTINGS = """
from softmetal.simt import harness
settings = harness._runtime().softmetal_current_settings().contents
print(settings.threads, settings.order, settings.seed, settings.checks)
print(settings.tensor_layout, settings.tensor_seed)
"""
USUAL = ("0 0 0 0", "1 0")
LAYOUT, FAMILY = "SOFTMETAL_TENSOR_LAYOUT", "SOFTMETAL_GPU_FAMILY"


@pytest.mark.parametrize(
    ("environment", "expected", "complaint"),
    [
        ({}, USUAL, ""),
        ({"SOFTMETAL_CHECK": "1"}, ("0 0 0 31", "1 0"), ""),
        ({"SOFTMETAL_CHECK": "race,uninit", "SOFTMETAL_THREADS": "3"}, ("3 0 0 5", "1 0"), ""),
        ({"SOFTMETAL_CHECK": "0", "SOFTMETAL_ORDER": "reverse"}, ("0 1 0 0", "1 0"), ""),
        ({"SOFTMETAL_ORDER": "random:42"}, ("0 2 42 0", "1 0"), ""),
        ({"SOFTMETAL_CHECK": "race,typo"}, ("0 0 0 1", "1 0"), "names an unknown check, 'typo'"),
        ({"SOFTMETAL_ORDER": "sideways"}, USUAL, "is 'sideways'"),
        ({LAYOUT: "", FAMILY: "9"}, USUAL, ""),
        ({FAMILY: "10"}, ("0 0 0 0", "0 0"), ""),
        ({LAYOUT: "m5"}, ("0 0 0 0", "0 0"), ""),
        ({LAYOUT: "blocks8", FAMILY: "10"}, USUAL, ""),
        ({LAYOUT: f"random:{2**64 - 1}", FAMILY: "10"}, ("0 0 0 0", f"2 {2**64 - 1}"), ""),
        ({LAYOUT: "m4", FAMILY: "10"}, ("0 0 0 0", "0 0"), "SOFTMETAL_TENSOR_LAYOUT is 'm4'"),
        ({LAYOUT: "random"}, USUAL, "SOFTMETAL_TENSOR_LAYOUT is 'random'"),
        ({LAYOUT: "random:x"}, USUAL, "SOFTMETAL_TENSOR_LAYOUT is 'random:x'"),
    ],
    ids=str,
)
def test_environment(environment: dict[str, str], expected: tuple[str, str], complaint: str) -> None:
    command = [sys.executable, "-c", PRINT_SETTINGS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert tuple(done.stdout.splitlines()) == expected
    assert complaint in done.stderr and bool(done.stderr) == bool(complaint)
