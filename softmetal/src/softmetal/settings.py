"""The settings of the runtime (softmetal_settings in simt/abi.h) and the names of their values."""

from __future__ import annotations

import ctypes
import re

ORDERS = {"forward": 0, "reverse": 1, "random": 2}
CHECKS = {"race": 1, "bounds": 2, "uninit": 4, "bytes": 8, "distinct": 16}
# Layouts of cooperative tensors (simt/tensor_layouts.cpp).
_KNOWN = {"m5": 0, "blocks8": 1}
_RANDOM = 2  # SOFTMETAL_LAYOUT_RANDOM


def uint32(*names: str) -> list[tuple[str, type[ctypes.c_uint32]]]:
    """Fields of a structure."""
    return [(name, ctypes.c_uint32) for name in names]


class Settings(ctypes.Structure):
    _fields_ = [
        *uint32("threads", "order"),
        ("seed", ctypes.c_uint64),
        *uint32("checks", "watchdog_ms", "tensor_layout"),
        ("tensor_seed", ctypes.c_uint64),
    ]


def number_and_seed(layout: str) -> tuple[int, int]:
    """The layout and seed in softmetal_settings of "m5", "blocks8" or "random:SEED"."""
    if layout in _KNOWN:
        return _KNOWN[layout], 0
    seed = re.fullmatch(r"random:(\d+)", layout)
    if seed is None or int(seed[1]) >= 1 << 64:
        raise ValueError(f"tensor_layout {layout!r} is unknown; use 'm5', 'blocks8' or 'random:SEED'.")
    return _RANDOM, int(seed[1])
