"""The backend of an NVIDIA GPU, which runs the Metal sources translated to CUDA.

Needs torch with CUDA, softmetal and the folder that build.py wrote, but not torch_fattn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ...cases.arguments import WrongArgumentError
from ...cases.buffers import TOLERANCE
from ...cases.calls import Call
from ...peers.launch import OURS, call_of
from ..backend import common_versions, timed_row
from . import FOLDER


class CudaBackend:
    name = "cuda"

    def __init__(self, folder: Path = FOLDER) -> None:
        if not torch.cuda.is_available():
            raise WrongArgumentError(
                "--backend cuda times an NVIDIA GPU, and torch.cuda finds none here; leave the option out to "
                "use the best backend for this machine"
            )
        if not (folder / "manifest.json").exists():
            raise WrongArgumentError(
                f"--backend cuda finds no compiled kernels in bench/{folder.name}; run "
                "`python -m bench cuda-build` where softmetal and nvcc are, and copy the folder here"
            )
        from . import run

        self._gpu = run
        self._runner = run.Runner(folder)
        self._ceilings: dict[str, float] = {}

    def machine(self) -> str:
        facts = self._gpu.machine()
        return f"{facts['name']}, driver {facts['driver']} ({facts['kind']})"

    def versions(self) -> dict[str, str]:
        # The folder records its commit, because this machine may have no git.
        built = self._runner.manifest["versions"]
        return {**common_versions(), "cuda": str(torch.version.cuda), **built}

    def implementations(self) -> Sequence[str]:
        implementations = dict.fromkeys(row["impl"] for row in self._runner.manifest["rows"])
        return [OURS, *(impl for impl in implementations if impl != OURS)]

    def ceilings(self) -> dict[str, float]:
        if not self._ceilings:
            self._ceilings = self._gpu.measure_ceilings(self._runner)
        return self._ceilings

    def measure(self, call: Call, impl: str) -> dict[str, Any]:
        row = self._find(call, impl)
        buffers, largest, relative = self._gpu.run_row(self._runner, row, "cuda")
        if not relative < TOLERANCE[call.dtype]:
            raise NotImplementedError(f"{impl} computes this wrongly: relative error {relative:.1e}")
        times, found = self._gpu.time_row(self._runner, row, buffers)
        return {**timed_row(row["call"], times, self.ceilings(), largest), **found}

    def _find(self, call: Call, impl: str) -> dict[str, Any]:
        manifest, wanted = self._runner.manifest, (call_of(impl, replace(call, model="")), impl)
        for row in (*manifest["rows"], *manifest["refused"]):
            if (row["call"], row["impl"]) == wanted:
                if "why" in row:
                    raise NotImplementedError(row["why"])
                match: dict[str, Any] = row
                return match
        raise NotImplementedError(f"no kernel of {impl} for this call was compiled into bench/_cuda")
