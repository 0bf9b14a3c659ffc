"""The public interface to Apple's machine code and its costs: docs/agx.md."""

from __future__ import annotations

from ..agx.compile import Cost, LoopCost, NotBuiltError, compile_kernel
from ..agx.scheduler import Band
from ..agx.translate import AgxError, Kernel

__all__ = ["AgxError", "Band", "Cost", "Kernel", "LoopCost", "NotBuiltError", "compile_kernel"]
