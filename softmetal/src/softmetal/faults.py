"""Faults that a test injects into kernels, to simulate another GPU or compiler."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from .control import finish_stream, load
from .settings import uint32


class _Fault(ctypes.Structure):  # softmetal_fault in framework/faults.h
    _fields_ = [
        ("kernel", ctypes.c_char_p),
        ("macro", ctypes.c_char_p),
        *uint32("fails", "stops", "delay_ms", "max_threads"),
        ("slot", ctypes.c_int32),
        ("flipped", ctypes.c_uint32),
        ("byte", ctypes.c_uint64),
        ("least_groups", ctypes.c_uint64),
    ]


@dataclass(frozen=True)
class Flip:
    """Flips the bits of a 32-bit word in the buffer of a slot, after each dispatch of at least so many
    threadgroups."""

    slot: int
    bits: int
    byte: int = 0
    least_groups: int = 0


class Fault:
    """How often a fault took effect."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._last = 0

    @property
    def hits(self) -> int:
        if self._number >= 0:
            self._last = load().softmetal_fault_hits(self._number)
        return self._last

    def _end(self) -> None:
        _ = self.hits
        load().softmetal_remove_fault(self._number)
        self._number = -1


@contextmanager
def fault(
    kernel: str,
    *,
    macro: tuple[str, str] | None = None,
    fails: bool = False,
    stops: bool = False,
    delay: float = 0.0,
    max_threads: int = 0,
    flip: Flip | None = None,
) -> Iterator[Fault]:
    """Give the kernel of this name a fault, in libraries that are compiled with `macro` (name and value;
    default: in all).

    `fails`: its library does not compile. `delay`: its library takes that many seconds longer. `max_threads`:
    its pipelines report at most so many threads per threadgroup. Libraries and pipelines that exist already
    are not affected by these three. `stops`: its dispatches end in an error. `flip`: they have a wrong
    result.
    """
    if not (fails or stops or delay or max_threads or flip):
        raise ValueError(f"fault({kernel!r}): give fails, stops, delay, max_threads or flip.")
    given = _Fault(
        kernel=kernel.encode(),
        macro="=".join(macro).encode() if macro else b"",
        fails=fails,
        stops=stops,
        delay_ms=round(delay * 1000),
        max_threads=max_threads,
        slot=flip.slot if flip else -1,
        flipped=flip.bits if flip else 0,
        byte=flip.byte if flip else 0,
        least_groups=flip.least_groups if flip else 0,
    )
    finish_stream()
    load().softmetal_fault_hits.restype = ctypes.c_uint64
    injected = Fault(load().softmetal_add_fault(ctypes.byref(given)))
    try:
        yield injected
        finish_stream()
    finally:
        injected._end()
