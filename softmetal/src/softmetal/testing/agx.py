"""The public interface to Apple's machine code and its costs: docs/agx.md."""

from __future__ import annotations

from ..agx.build import is_built
from ..agx.compile import (
    THREADS_BY_REGISTERS,
    Cost,
    LoopCost,
    NotBuiltError,
    StepCost,
    compile_kernel,
    compiled,
    cost_of,
    resident_threads,
    version,
)
from ..agx.scheduler import Band
from ..agx.translate import AgxError, Kernel

__all__ = [
    "THREADS_BY_REGISTERS",
    "AgxError",
    "Band",
    "Cost",
    "Kernel",
    "LoopCost",
    "NotBuiltError",
    "StepCost",
    "compile_kernel",
    "compiled",
    "cost_of",
    "is_built",
    "resident_threads",
    "version",
]
