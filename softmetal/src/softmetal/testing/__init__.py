"""The public interface for tests and tools: run kernels without the Metal framework, read the compiler's
errors, query the device, build extensions, compile for a test run.

Checks, records and counts of kernels that run through torch are in `softmetal` itself; kernels on an NVIDIA
GPU are in `softmetal.testing.cuda`. All other modules of the package are private.
"""

from __future__ import annotations

from ..control import device_facts
from ..msl.compile import compile_errors
from ..msl.language import LANGUAGES
from ..native import environment as build_environment
from ..simt.harness import KernelError, Library, Pipeline
from .compile_server import compile_server

LANGUAGE_VERSIONS = tuple(LANGUAGES)

__all__ = [
    "LANGUAGE_VERSIONS",
    "KernelError",
    "Library",
    "Pipeline",
    "build_environment",
    "compile_errors",
    "compile_server",
    "device_facts",
]
