"""The pipelines that this process has compiled, and their compile times."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..runtime.signatures import public

__all__ = ["CompiledKernel", "compiled_kernels"]


@dataclass(frozen=True)
class CompiledKernel:
    """A pipeline of this process: a specialised kernel function."""

    kernel: str
    source: str
    macros: Mapping[str, str]
    constants: Mapping[str, Any]
    library_seconds: float  # from source to library; 0 if an earlier pipeline uses the same library
    pipeline_seconds: float  # from library to machine code, and writing the archive
    archived: bool  # pipeline read from an earlier process's archive; only the library was compiled

    @property
    def seconds(self) -> float:
        return self.library_seconds + self.pipeline_seconds

    @public("CompiledKernel.is_launched_by")
    def is_launched_by(self, launch: Mapping[str, Any]) -> bool:
        """Whether this pass of a plan uses this pipeline."""
        return all(launch.get(name) == getattr(self, name) for name in ("kernel", "macros", "constants"))

    @property
    def times(self) -> str:
        return (
            f"{self.seconds:.2f} s (library {self.library_seconds:.2f} s, "
            f"pipeline {self.pipeline_seconds:.2f} s{', archived' if self.archived else ''})"
        )

    def __str__(self) -> str:
        return f"{self.kernel} in {self.times}"


def compiled_kernels() -> list[CompiledKernel]:
    """The pipelines that this process has compiled, in order, with compile times."""
    return [CompiledKernel(**entry) for entry in json.loads(torch.ops.fattn._compiled_pipelines())]


def counted(kernels: int) -> str:
    return f"{kernels} kernel{'' if kernels == 1 else 's'}"


def compile_summary() -> str:
    """One line: the number of compiled kernels, and the seconds per kernel function."""
    kernels = compiled_kernels()
    seconds: dict[str, list[float]] = {}
    for kernel in kernels:
        seconds.setdefault(kernel.kernel, []).append(kernel.seconds)
    slowest_first = sorted(seconds.items(), key=lambda item: -sum(item[1]))
    parts = ", ".join(f"{len(each)} x {name} {sum(each):.1f} s" for name, each in slowest_first)
    return f"{counted(len(kernels))} in {sum(map(sum, seconds.values())):.1f} s" + (
        f": {parts}" if parts else ""
    )
