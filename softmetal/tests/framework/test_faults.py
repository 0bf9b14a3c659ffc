"""Injected faults, and the build of the simulated macOS."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from types import ModuleType

import pytest

import softmetal

torch = pytest.importorskip("torch")

SOURCE = """
kernel void answer(device uint* y [[buffer(0)]], uint i [[thread_position_in_grid]]) { y[i] = VALUE; }
"""
BUILD = """
import ctypes
import torch
from softmetal.control import load

for name in ("kern.osversion", "kern.hostname"):
    size = ctypes.c_size_t(64)
    text = ctypes.create_string_buffer(64)
    failed = load().sysctlbyname(name.encode(), text, ctypes.byref(size), None, ctypes.c_size_t(0))
    print(name, failed or text.value.decode())
"""


def run(kit: ModuleType, value: int, groups: int = 1, threads: int = 8) -> list[int]:
    """A library of its own for each value."""
    y = torch.zeros(groups * threads, dtype=torch.int32, device="mps")
    kit.run(SOURCE, "answer", [y], {"VALUE": str(value)}, [], [groups, 1, 1], [threads, 1, 1], 0)
    return y.cpu().tolist()


def test_a_library_does_not_compile(kit: ModuleType) -> None:
    with softmetal.fault("answer", macro=("VALUE", "3"), fails=True) as fault:
        with pytest.raises(RuntimeError, match="injected fault of kernel 'answer'"):
            run(kit, 3)
        assert run(kit, 4) == [4] * 8, "the macro has another value"
    assert fault.hits == 1
    assert run(kit, 3) == [3] * 8, "the fault has ended"


def test_a_library_takes_long(kit: ModuleType) -> None:
    run(kit, 5)  # compiled, and in softmetal's cache
    with softmetal.fault("answer", delay=0.5) as fault:
        start = time.monotonic()
        assert run(kit, 5) == [5] * 8
        assert time.monotonic() - start >= 0.5
    assert fault.hits == 1


def test_a_pipeline_takes_few_threads(kit: ModuleType) -> None:
    with softmetal.fault("answer", max_threads=4) as fault:
        assert run(kit, 6, threads=4) == [6] * 4
        with pytest.raises(RuntimeError, match="maxTotalThreadsPerThreadgroup of 4"):
            run(kit, 6, threads=8)
    assert fault.hits == 2


def test_a_result_is_wrong(kit: ModuleType) -> None:
    flip = softmetal.Flip(slot=0, bits=0x100, byte=8, least_groups=2)
    with softmetal.fault("answer", flip=flip) as fault, softmetal.fault("question", flip=flip) as other:
        assert run(kit, 7) == [7] * 8, "too few threadgroups"
        assert run(kit, 7, groups=2) == [7, 7, 0x107, *[7] * 13]
    assert fault.hits == 1
    assert other.hits == 0, "of another kernel"


def test_a_dispatch_stops(kit: ModuleType) -> None:
    with softmetal.fault("answer", stops=True) as fault:
        with pytest.raises(RuntimeError, match="an injected fault stopped kernel 'answer'"):
            run(kit, 8)
    assert fault.hits == 1
    assert run(kit, 8) == [8] * 8, "the fault has ended"


def test_a_fault_has_a_kind() -> None:
    with (
        pytest.raises(ValueError, match="give fails, stops, delay, max_threads or flip"),
        softmetal.fault("answer"),
    ):
        pass


@pytest.mark.parametrize(("macos", "build"), [("26.2", "25C99"), ("", "-1")])
def test_the_build_of_the_simulated_macos(macos: str, build: str) -> None:
    env = {**os.environ, "SOFTMETAL_MACOS": macos, "SOFTMETAL_MACOS_BUILD": "25C99"}
    done = subprocess.run([sys.executable, "-c", BUILD], capture_output=True, text=True, env=env, check=True)
    assert done.stdout.splitlines() == [f"kern.osversion {build}", "kern.hostname -1"]
