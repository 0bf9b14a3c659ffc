"""Times the host's part of a call: planning alone, and the operator from Python to the end of encoding.

    python -m bench host-cost

The second number includes everything before the GPU's work: torch's dispatch, checks, planning, allocation
and encoding. On Linux the encoder is software, so the number is an upper bound for this CPU. The timed part
neither waits for results nor compiles.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

import torch_fattn  # noqa: F401  registers torch.ops.fattn

from ..cases.arguments import Parser

ROOT = Path(__file__).resolve().parents[2]
REPEATS = 30
CALLS = 20  # calls between two synchronisations


def plan_nanoseconds() -> dict[str, float]:
    """Compiles plan_cost.cpp with the planner, and runs it."""
    compiler = os.environ.get("CXX") or shutil.which("clang++") or shutil.which("clang++-19") or "c++"
    sources = [Path(__file__).with_name("plan_cost.cpp"), *sorted((ROOT / "csrc" / "plan").glob("*.cpp"))]
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "plan_cost"
        subprocess.run([compiler, "-std=c++20", "-O2", *map(str, sources), "-o", str(program)], check=True)
        lines = subprocess.run([program], check=True, capture_output=True, text=True).stdout.splitlines()
    return {name: float(value) for name, value in map(str.split, lines)}


def synchronize(device: str) -> None:
    if device == "mps":
        torch.mps.synchronize()


def call_microseconds(call: Callable[[], object], device: str) -> float:
    """Returns the median over REPEATS of the mean time of CALLS calls."""
    for _ in range(3):
        call()
    means = []
    for _ in range(REPEATS):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        means.append((time.perf_counter() - start) / CALLS)
    synchronize(device)
    return statistics.median(means) * 1e6


def calls(device: str) -> dict[str, Callable[[], object]]:
    """The timed calls. Their tensors are small, which the host's work does not depend on."""
    ops = torch.ops.fattn
    query = torch.randn(1, 4, 1, 64, device=device)
    key = torch.randn(1, 1, 8, 64, device=device)
    pool = torch.randn(2, 8, 1, 64, device=device)
    table = torch.zeros(1, 1, dtype=torch.int32, device=device)
    lens = torch.ones(1, dtype=torch.int32, device=device)
    outs, lses = torch.randn(2, 1, 4, 1, 64, device=device), torch.randn(2, 1, 4, 1, device=device)
    nothing = query[:0], key[:0], key[:0]
    return {
        "fattn::prefill": lambda: ops.prefill(query, key, key, is_causal=True),
        "fattn::decode": lambda: ops.decode(query, key, key, lens),
        "fattn::paged_decode": lambda: ops.paged_decode(query, pool, pool, table, lens),
        "fattn::merge": lambda: ops.merge(outs, lses),
        "fattn::decode, empty batch (no encoding)": lambda: ops.decode(*nothing),
        "aten::empty (for comparison)": lambda: torch.empty(1, 4, 1, 64, device=device),
    }


def main(arguments: list[str] | None = None) -> int:
    Parser(prog="python -m bench host-cost", description=__doc__).parse_args(arguments)
    print("plan(), per call")
    for name, nanoseconds in plan_nanoseconds().items():
        print(f"  {name:<42}{nanoseconds / 1e3:8.3f} us")
    device = "mps" if torch.backends.mps.is_available() else "cpu"
    print(f"op call from Python, up to the encoder, device={device!r}")
    with torch.inference_mode():
        for name, call in calls(device).items():
            print(f"  {name:<42}{call_microseconds(call, device):8.2f} us")
    return 0
