"""The launch of a call: passes over named buffers, and scratch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ..cases.calls import METAL_TYPES, Call

if TYPE_CHECKING:
    from softmetal.testing.cuda import Pipeline

OURS = "fattn"
OURS_ON_M1 = "fattn-m1"  # our plans for M1 and M2, where those for later chips differ
SAME_PLAN = f"it is the plan of {OURS}"  # why such a row was not timed
# Our plans for a GPU with tensor units, by where scores are.
OURS_ON_TENSORS = {"registers": "fattn-tensor", "threadgroup": "fattn-tensor-threadgroup"}


@dataclass(frozen=True)
class Pass:
    """One dispatch. An argument is bytes, or the name of a buffer: scratch, or one of cases/buffers.py."""

    pipeline: Pipeline
    grid: tuple[int, int, int]
    threads: tuple[int, int, int]
    arguments: Mapping[int, str | bytes]


@dataclass(frozen=True)
class Launch:
    """How an implementation runs a call."""

    impl: str
    passes: list[Pass]
    scratch: Mapping[str, int] = field(default_factory=dict)  # buffer name -> bytes
    out_rows_first: bool = False  # the output is [B, Lq, H, D]
    note: str = ""  # the choice of its launch rule
    # Launches for other chips, over the same buffers; the bench reports the fastest.
    alternatives: Sequence[Launch] = ()

    @property
    def buffers(self) -> set[str]:
        """The buffers that the passes name."""
        return {name for one in self.passes for name in one.arguments.values() if isinstance(name, str)}


def with_rounded_states(launch: Launch, dtype: str) -> Launch:
    """Adds the launch whose products round states to 16 bits: one instruction on NVIDIA instead of three."""
    element = METAL_TYPES[dtype]
    passes = [replace(one, pipeline=replace(one.pipeline, widened_from=element)) for one in launch.passes]
    rounded = replace(launch, passes=passes, note=f"{launch.note}; states rounded in products")
    return replace(launch, alternatives=[rounded])


def call_of(impl: str, call: Call) -> Call:
    """What an implementation runs for a call: the peers have the rule alone of a step of linear attention."""
    is_rule = call.op == "gated_delta_step" and impl not in (OURS, OURS_ON_M1)
    return replace(call, op="gated_delta_rule") if is_rule else call


def partials(call: Call, splits: int) -> dict[str, int]:
    """Scratch of a decode in two passes, by MLX and torch: results of the splits, their sums and maxima."""
    rows = call.batch * call.q_heads * call.q_len * splits
    return {"partials": rows * call.head_dim * call.element_bytes, "sums": rows * 4, "maxs": rows * 4}
