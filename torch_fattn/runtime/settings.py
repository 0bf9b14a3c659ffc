"""The environment variables, and the folder for tuned sizes, archived pipelines and verdicts of self-tests.
Its contents can be regenerated."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

ROUTES = ("auto", "always")
_faults: list[str] = []  # invalid values


def cache_folder() -> Path:
    """$FATTN_CACHE, or the platform's place for caches. It need not exist."""
    if chosen := os.environ.get("FATTN_CACHE"):
        return Path(chosen)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "torch_fattn"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torch_fattn"


def tuning_is_off() -> bool:
    return os.environ.get("FATTN_TUNING") == "0"


def archives_are_on() -> bool:
    return (os.environ.get("FATTN_ARCHIVE") or "0") != "0"


def apply(version: str) -> None:
    """Gives the settings to the extension. An invalid one raises on first use, not at import."""
    _faults.clear()
    if fault := torch.ops.fattn._set_tensor_setting(os.environ.get("FATTN_TENSOR", "")):
        _faults.append(fault)
    route = os.environ.get("FATTN_ROUTE") or "auto"
    torch.ops.fattn._route_always_here(route == "always")
    if route not in ROUTES:
        _faults.append(f"FATTN_ROUTE is {route!r} and must be one of {', '.join(ROUTES)}; unset it for auto")
    try:
        folder = cache_folder()
    except RuntimeError:  # no home folder
        return
    # A verdict is valid for one build of the system and of the kernels.
    torch.ops.fattn._set_tensor_folder(str(folder))
    if archives_are_on():
        torch.ops.fattn._set_archive_folder(str(folder / "pipelines" / version))


def check_settings(asker: str = "torch_fattn: ") -> None:
    """Raises for an invalid value of FATTN_ROUTE or FATTN_TENSOR."""
    if _faults:
        raise ValueError(asker + _faults[0])
