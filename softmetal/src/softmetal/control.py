"""Checks, counters and records of the running softmetal, through the C functions of its native library.

Nothing here imports torch, and the library is loaded at first use.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .paths import LIBRARY, RUNTIME_LIBRARY
from .settings import CHECKS, ORDERS, Settings, number_and_seed


class SoftmetalMissingError(ImportError):
    """The native library is not built."""


@functools.cache
def load() -> ctypes.CDLL:
    """The native library. Its symbols become global: compiled kernels are linked against them when loaded."""
    if not LIBRARY.exists():
        raise SoftmetalMissingError(f"{LIBRARY.name} is not built; run `python -m softmetal build`.")
    os.environ.setdefault("SOFTMETAL_PYTHON", sys.executable)
    ctypes.CDLL(str(RUNTIME_LIBRARY), mode=ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(str(LIBRARY), mode=ctypes.RTLD_GLOBAL)
    for name in ("stop_recording", "totals", "live_objects", "device_facts"):
        getattr(library, f"softmetal_{name}").restype = ctypes.c_void_p
    for name in ("allocated_bytes", "peak_bytes"):
        getattr(library, f"softmetal_{name}").restype = ctypes.c_size_t
    library.softmetal_free.argtypes = [ctypes.c_void_p]
    library.softmetal_free.restype = None
    library.softmetal_current_settings.restype = ctypes.POINTER(Settings)
    return library


def _json(function: str) -> Any:
    text = getattr(load(), f"softmetal_{function}")()
    try:
        return json.loads(ctypes.string_at(text))
    finally:
        load().softmetal_free(text)


def finish_stream() -> None:
    """Run the encoded commands under the settings that were current when they were encoded."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.mps.synchronize()


@contextmanager
def checks(
    race: bool = False,
    bounds: bool = False,
    uninit: bool = False,
    count_bytes: bool = False,
    count_distinct: bool = False,
    order: str | None = None,
    seed: int | None = None,
    threads: int | None = None,
    tensor_layout: str | None = None,
) -> Iterator[None]:
    """Run the kernels launched in this context with these checks; a finding raises RuntimeError, on exit at
    the latest.

    `order` is the order of the threads in a threadgroup: "forward", "reverse" or "random" (with `seed`).
    `tensor_layout` is the layout of cooperative tensors: "m5", "blocks8" or "random:SEED", where SEED % 4
    selects the compatible tensors (0: none; 1: reductions; 2: all; 3: all, and some slots are
    empty). The default is the layout of the simulated GPU.
    Checked kernels are compiled at their first use. `count_distinct` counts each byte that a threadgroup
    reads once, however often it is loaded.
    """
    if order is not None and order not in ORDERS:
        raise ValueError(f"checks(order={order!r}): use one of {', '.join(ORDERS)}.")
    layout = None if tensor_layout is None else number_and_seed(tensor_layout)
    settings = load().softmetal_current_settings().contents
    finish_stream()
    saved = {field[0]: getattr(settings, field[0]) for field in Settings._fields_}
    wanted = (race, bounds, uninit, count_bytes, count_distinct)
    settings.checks = sum(bit for bit, on in zip(CHECKS.values(), wanted, strict=True) if on)
    if order is not None:
        settings.order = ORDERS[order]
    if seed is not None:
        settings.seed = seed
    if threads is not None:
        settings.threads = threads
    if layout is not None:
        settings.tensor_layout, settings.tensor_seed = layout
    try:
        yield
        finish_stream()
    finally:
        for name, value in saved.items():
            setattr(settings, name, value)


@contextmanager
def record() -> Iterator[list[dict[str, Any]]]:
    """Record the dispatches that run in this context: kernel, grid, threads, threadgroup_bytes, counters and,
    if bytes are counted, bytes read and written (and bytes read counted once per threadgroup) by buffer slot.

    The list is filled on exit.
    """
    launched: list[dict[str, Any]] = []
    finish_stream()
    load().softmetal_start_recording()
    try:
        yield launched
        finish_stream()
    finally:
        launched.extend(_json("stop_recording"))


def counters() -> dict[str, Any]:
    """Sums over all dispatches since the start or the last reset_counters()."""
    finish_stream()
    return dict(_json("totals")["counters"])


def launches() -> dict[str, int]:
    """The number of launches of each kernel since the start or the last reset_counters()."""
    finish_stream()
    return dict(_json("totals")["launches"])


def reset_counters() -> None:
    finish_stream()
    load().softmetal_reset_totals()


class PeakMemory:
    """The most bytes of buffers at a time, above those that lived when the context began."""

    bytes = 0


@contextmanager
def peak_memory() -> Iterator[PeakMemory]:
    """Measure the memory of the buffers in this context; the result is filled in on exit. Contexts do not
    nest."""
    finish_stream()
    peak = PeakMemory()
    before = load().softmetal_allocated_bytes()
    load().softmetal_restart_peak()
    yield peak
    finish_stream()
    peak.bytes = load().softmetal_peak_bytes() - before


def live_objects() -> dict[str, int]:
    """The number of live Metal objects, by class."""
    finish_stream()
    return dict(_json("live_objects"))


def device_facts() -> dict[str, Any]:
    """Name, GPU cores and memory of the device."""
    return dict(_json("device_facts"))
