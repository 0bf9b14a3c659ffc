"""Warnings that point to the caller's line instead of a line in a library."""

from __future__ import annotations

import sys
import warnings

import torch

_LIBRARIES = {"importlib", "torch", "torch_fattn", "transformers"}


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Silent during tracing: Dynamo cannot read frames."""
    if torch.compiler.is_compiling():
        return
    frame = sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in _LIBRARIES:
        frame = frame.f_back
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(message, category, frame.f_code.co_filename, frame.f_lineno, registry=registry)
