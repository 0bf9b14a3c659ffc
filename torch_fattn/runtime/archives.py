"""Where compiled kernels are kept between runs: csrc/metal/archive.mm does it."""

from __future__ import annotations

import torch

from .cache_folder import archives_are_off, cache_folder


def use_folder(version: str) -> None:
    """From now on. Nothing is made there before there is something to keep."""
    if archives_are_off():
        return
    try:
        folder = cache_folder() / "pipelines" / version
    except RuntimeError:  # no home folder
        return
    torch.ops.fattn._set_archive_folder(str(folder))
