"""How an implementation runs a case: passes over named buffers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from softmetal.cuda.compile import Pipeline

OURS = "fattn"
OURS_ON_M1 = "fattn-m1"  # the plans for M1 and M2, on a GPU for which there are others


@dataclass(frozen=True)
class Pass:
    """One dispatch. An argument is bytes, or the name of a buffer: one of bench/cases/buffers.py, or scratch."""

    pipeline: Pipeline
    grid: tuple[int, int, int]
    threads: tuple[int, int, int]
    arguments: Mapping[int, str | bytes]


@dataclass(frozen=True)
class Launch:
    """How an implementation runs a case."""

    impl: str
    passes: list[Pass]
    scratch: Mapping[str, int] = field(default_factory=dict)  # buffer name -> bytes
    out_rows_first: bool = False  # the output is [B, Lq, H, D]
    note: str = ""  # what its launch rule chose
    # How it runs the case on other chips, over the same buffers: the bench quotes the fastest.
    alternatives: Sequence[Launch] = ()
