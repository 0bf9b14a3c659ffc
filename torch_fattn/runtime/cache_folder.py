"""The folder for tuned sizes and archived pipelines. Its contents can be regenerated."""

from __future__ import annotations

import os
import sys
from pathlib import Path


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
