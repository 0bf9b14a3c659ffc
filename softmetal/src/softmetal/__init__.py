"""softmetal: Metal compute in software. Metal code for PyTorch builds and runs on Linux.

When it is installed, `import torch` provides device="mps": see README.md.
"""

from __future__ import annotations

from .control import (
    SoftmetalMissingError,
    checks,
    counters,
    launches,
    live_objects,
    peak_memory,
    record,
    reset_counters,
)
from .faults import Fault, Flip, fault

__all__ = [
    "Fault",
    "Flip",
    "SoftmetalMissingError",
    "checks",
    "counters",
    "fault",
    "launches",
    "live_objects",
    "peak_memory",
    "record",
    "reset_counters",
]
__version__ = "0.1.0"
