"""Chooses the backend for this machine."""

from __future__ import annotations

import sys

import torch

from .backend import Backend

BACKENDS = ("metal", "cuda", "counts")


def choose(name: str | None) -> Backend:
    """Returns the named backend, or the best one for this machine."""
    if name is None:
        name = "counts"
        if sys.platform == "darwin" and torch.backends.mps.is_available():
            name = "metal"
        elif torch.cuda.is_available():
            name = "cuda"
    if name == "metal":
        from .metal import MetalBackend

        return MetalBackend()
    if name == "cuda":
        from .cuda.backend import CudaBackend

        return CudaBackend()
    from .counts import CountsBackend

    return CountsBackend()
