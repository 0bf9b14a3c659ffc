"""The SIMT runtime, and a harness that launches kernels on it without the Metal framework."""

from softmetal.simt.harness import KernelError, Library, Pipeline

__all__ = ["KernelError", "Library", "Pipeline"]
