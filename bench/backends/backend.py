"""The interface of a backend, and what the backends share."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import torch

from ..cases.calls import Call


class Backend(Protocol):
    """Measures calls on one kind of machine.

    `measure` returns the fields of a row: ms_median, ms_min, ms_max, rate, rate_unit, ceiling_fraction and
    max_error if it times, counts and counted_as if it counts. It raises NotImplementedError, with the reason,
    for a call that the implementation refuses. `ceilings` returns the ceilings of this run, {"read": GB/s,
    "products": TFLOP/s}, or nothing.
    """

    name: str

    def machine(self) -> str: ...
    def versions(self) -> dict[str, str]: ...
    def implementations(self) -> Sequence[str]: ...
    def ceilings(self) -> dict[str, float]: ...
    def measure(self, call: Call, impl: str) -> dict[str, Any]: ...


def common_versions() -> dict[str, str]:
    """Versions of torch, Python, the system, our package and the peers', and the commit."""
    versions = {"torch": torch.__version__, "python": platform.python_version(), "os": platform.platform()}
    for package in ("torch-fattn", "mlx", "mlx-metal"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    versions["commit"] = commit()
    return versions


def commit() -> str:
    """The commit of the checkout, with a plus sign if there are uncommitted changes."""
    checkout = Path(__file__).resolve().parents[2]

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(checkout), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _rate_of(call: Call, milliseconds: float) -> tuple[float, str, str]:
    """Returns the rate of a call, its unit, and the name of the ceiling to compare it with.

    The rate of a decode counts the bytes that must move, that of a prefill the operations on visible pairs.
    """
    if call.is_decode:
        return call.least_bytes / milliseconds / 1e6, "GB/s", "read"
    return call.flops / milliseconds / 1e9, "TFLOP/s", "products"


def timed_row(
    call: Call, times: Sequence[float], ceilings: Mapping[str, float], error: float
) -> dict[str, Any]:
    """Returns the fields of a timed row; `times` in milliseconds."""
    rate, unit, ceiling = _rate_of(call, median(times))
    return {
        "ms_median": median(times),
        "ms_min": min(times),
        "ms_max": max(times),
        "rate": rate,
        "rate_unit": unit,
        "ceiling_fraction": rate / ceilings[ceiling],
        "max_error": error,
    }
