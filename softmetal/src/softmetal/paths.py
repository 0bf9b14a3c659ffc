"""Paths of the package, and of the libraries that `python -m softmetal build` builds in it."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
BUILD = PACKAGE / "_build"
LIBRARY = BUILD / "libsoftmetal.so"
RUNTIME_LIBRARY = BUILD / "libsoftmetal_simt.so"
