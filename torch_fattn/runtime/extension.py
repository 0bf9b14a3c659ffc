"""Loads the extension. For a build against another torch, the loader's errors are unreadable, so each case
has its own message."""

from __future__ import annotations

import importlib
import importlib.util

import torch

from . import versions

_REBUILD = (
    "in the environment that has this torch install the wheel for it, or run "
    "`pip install --no-build-isolation .` in the sources of torch_fattn"
)


def load() -> str:
    """Registers `torch.ops.fattn` and returns the version of torch that the extension was built against."""
    if (fault := versions.fault("torch", torch.__version__, versions.TORCH)) is not None:
        raise ImportError(fault)
    if importlib.util.find_spec("torch_fattn._C") is None:
        raise ImportError(f"torch_fattn is not built: torch_fattn._C is missing; {_REBUILD}")
    try:
        extension = importlib.import_module("torch_fattn._C")
    except ImportError as error:
        raise ImportError(
            f"torch_fattn._C does not load into torch {torch.__version__}, probably because it was built "
            f"against another one; {_REBUILD} ({error})"
        ) from error
    built: str = extension.torch_version
    if versions.minor(built) != versions.minor(torch.__version__):
        raise ImportError(
            f"torch_fattn._C was built against torch {built} and cannot run in torch {torch.__version__}; "
            + _REBUILD
        )
    return built
