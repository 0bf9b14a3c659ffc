"""Whether this thread is in the forward of a fused model. What replaces functions of transformers acts only
there, so that models with other attention keep their own in the same process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

is_enabled = True  # whether fused modules run as such
# cos and sin as the model has them, and as the operator reads them, by the identity of cos and the form.
Tables = dict[tuple[int, Any], tuple[Tensor, ...]]
_here = threading.local()


def enable(enabled: bool) -> bool:
    """Returns what it was before."""
    global is_enabled
    before, is_enabled = is_enabled, enabled
    return before


def tables() -> Tables | None:
    """Those of this forward; None outside of a fused model, and in graphs of torch.compile."""
    return None if torch.compiler.is_compiling() else getattr(_here, "tables", None)


@contextmanager
def run(is_fused: bool) -> Iterator[None]:
    before = tables()
    _here.tables = {} if is_fused else None
    try:
        yield
    finally:
        _here.tables = before


def takes(x: Any) -> bool:
    """Whether the operators of linear attention run on a tensor. Elsewhere than on mps they are slow: there
    they only run to be counted."""
    return (
        tables() is not None
        and type(x) is Tensor
        and (x.device.type == "mps" or is_counted())
        and x.dtype in (torch.float32, torch.float16, torch.bfloat16)
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled(x.device.type)
    )


def is_counted() -> bool:
    """Whether kernels are counted, on any device."""
    return getattr(_here, "is_counted", False)


@contextmanager
def counted() -> Iterator[None]:
    before, _here.is_counted = is_counted(), True
    try:
        yield
    finally:
        _here.is_counted = before
