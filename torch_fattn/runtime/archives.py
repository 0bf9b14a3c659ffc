"""Sets the folder where csrc/metal/archive.mm keeps pipelines between runs."""

from __future__ import annotations

import torch

from .cache_folder import archives_are_on, cache_folder


def use_folder(version: str) -> None:
    """Sets the folder for new kernels, with FATTN_ARCHIVE=1. It is created with the first file."""
    if not archives_are_on():
        return
    try:
        folder = cache_folder() / "pipelines" / version
    except RuntimeError:  # no home directory
        return
    torch.ops.fattn._set_archive_folder(str(folder))
