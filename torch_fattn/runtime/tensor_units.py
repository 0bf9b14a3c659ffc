"""Metal 4's tensor operations on this machine: the state of each kind of call, dtype and head size, from
csrc/selftest."""

from __future__ import annotations

from dataclasses import dataclass

import torch

STATES = ("off", "untested", "threadgroup", "registers")


@dataclass(frozen=True)
class TensorState:
    """`call` is "prefill" or "backward". `state` is one of STATES. `why` is empty for "untested"."""

    call: str
    dtype: str
    dim: int
    state: str
    why: str


def why_off() -> str:
    """Why calls missing from `states` do not use tensor operations; "" if none is missing."""
    why: str = torch.ops.fattn._why_tensors_are_off()
    return why


def states() -> list[TensorState]:
    """A state for each kind of call, dtype and head size under the self-test: all, or, if `why_off` has a
    reason, only prefills that `tune` found to be faster."""
    rows = torch.ops.fattn._tensor_states()
    return [TensorState(row["call"], row["dtype"], int(row["dim"]), row["state"], row["why"]) for row in rows]


def test_all() -> None:
    """Runs all pending self-tests."""
    torch.ops.fattn._test_all_tensors()
