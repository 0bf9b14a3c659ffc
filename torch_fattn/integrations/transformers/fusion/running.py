"""The forward of a fused model that this thread runs. What replaces functions of transformers acts only
inside one, so that models with other attention keep their own in the same process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor


class Forward:
    """`rotates`: whether a rotary function of the model is replaced. `tables` are its cos and sin in the form
    that the kernel reads, by the identity of the model's, which they keep alive."""

    __slots__ = ("rotates", "tables")

    def __init__(self, rotates: bool) -> None:
        self.rotates = rotates
        self.tables: dict[int, tuple[Tensor, ...]] = {}


_here = threading.local()


def now() -> Forward | None:
    return getattr(_here, "forward", None)


@contextmanager
def run(forward: Forward | None) -> Iterator[None]:
    before = now()
    _here.forward = forward
    try:
        yield
    finally:
        _here.forward = before


def rotates() -> bool:
    """Whether a rotary function of the running model is replaced."""
    forward = now()
    return forward is not None and forward.rotates
