"""The public interface to Metal kernels on an NVIDIA GPU: docs/cuda.md."""

from __future__ import annotations

from ..cuda.compile import CompileError, Pipeline, compile_all, compile_pipeline
from ..cuda.launch import Arguments, Kernel, LaunchError

__all__ = [
    "Arguments",
    "CompileError",
    "Kernel",
    "LaunchError",
    "Pipeline",
    "compile_all",
    "compile_pipeline",
]
