"""Fixtures of all tests: the device, launch counts, and the emulator's checks if there is an emulator.

The same files run on a Mac and on Linux. Only the additional checks import `softmetal`; without it `checked`
does nothing, and the tests that need it are skipped.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_fattn

# Where softmetal is not installed, its folder in the checkout is a namespace package, without an origin.
_SOFTMETAL = importlib.util.find_spec("softmetal")
# On a Mac with softmetal's sources in reach, the GPU is still Apple's.
EMULATED = (
    sys.platform == "linux"
    and os.environ.get("SOFTMETAL") != "0"
    and _SOFTMETAL is not None
    and _SOFTMETAL.origin is not None
)

needs_emulator = pytest.mark.skipif(
    not EMULATED, reason="needs softmetal: a real GPU reports no data races, reads outside a buffer or counts"
)

Checked = Callable[..., contextlib.AbstractContextManager[Any]]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "host_only: needs no GPU")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Our kernels keep to what Apple's compiler is known to take; softmetal's tests judge other sources."""
    if Path(__file__).parent not in item.path.parents:
        return (yield)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOFTMETAL_REFUSE", "unsure")
        return (yield)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seeds", default="1-40", help="FIRST-LAST: of the sweep in test_random.py (slow)")
    parser.addoption("--problems", type=int, default=500, help="of each seed of that sweep")
    third, what = str(int(time.time() // 86400) % 3), "rotating cases that generate code on the emulator"
    parser.addoption("--third", choices=("0", "1", "2", "all"), default=third, help=f"{what} (by the day)")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "sweep_seed" in metafunc.fixturenames:
        first, _, last = metafunc.config.getoption("--seeds").partition("-")
        metafunc.parametrize("sweep_seed", range(int(first), int(last or first) + 1))


def pytest_report_header(config: pytest.Config) -> str:
    return f"rotating cases: --third {config.getoption('--third')}"


@cache
def why_no_gpu() -> str | None:
    if not torch.backends.mps.is_available():
        return "torch.backends.mps is not available: macOS 14+ with an Apple GPU, or softmetal, is needed"
    try:
        torch.ones(8, device="mps").sum().item()
    except RuntimeError as error:  # the paravirtual GPUs of hosted runners
        return f"this GPU cannot run a sum: {error}"
    query = torch.empty(1, 1, 1, 8, device="mps")
    try:
        torch_fattn.explain("decode", query, query, query)
    except NotImplementedError as refusal:  # an old GPU, or the invented one of a virtual machine
        return str(refusal)
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips a test that needs a GPU where there is none, before the fixtures of its module try to use one."""
    if item.get_closest_marker("host_only") is None and (reason := why_no_gpu()):
        pytest.skip(reason)


@pytest.fixture(params=["mps", pytest.param("cpu", marks=pytest.mark.host_only)])
def device(request: pytest.FixtureRequest) -> str:
    """A test that uses this fixture runs on both devices."""
    return str(request.param)


@pytest.fixture
def checked() -> Checked:
    """A context in which races, reads outside a buffer and uninitialised reads raise, on the emulator."""

    @contextlib.contextmanager
    def run(order: str = "forward", seed: int = 0) -> Iterator[None]:
        if not EMULATED:
            yield
            return
        import softmetal

        with softmetal.checks(race=True, bounds=True, uninit=True, order=order, seed=seed):
            yield
            torch.mps.synchronize()

    return run


@contextlib.contextmanager
def counted_launches() -> Iterator[dict[str, int]]:
    """Fills the dictionary that it yields, at the end, with the launches of each kernel inside."""
    if torch.backends.mps.is_available():
        torch.mps.synchronize()
    torch_fattn.reset_launch_counts()
    counts: dict[str, int] = {}
    yield counts
    counts.update(torch_fattn.launch_counts())


def decodes(launches: dict[str, int]) -> int:
    """Launches of decode's kernels, one of which rows and head sizes choose."""
    return sum(n for kernel, n in launches.items() if kernel.startswith("fattn_decode"))
