"""Metal 4's tensor operations on this machine: the setting FATTN_TENSOR, the folder of self-test verdicts,
and the state of each kind of call, dtype and head size, from csrc/selftest."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from .cache_folder import cache_folder

STATES = ("off", "untested", "threadgroup", "registers")

_wrong_setting = ""


@dataclass(frozen=True)
class TensorState:
    """`call` is "prefill" or "backward". `state` is one of STATES. `why` is empty for "untested"."""

    call: str
    dtype: str
    dim: int
    state: str
    why: str


def use_setting() -> None:
    """Reads FATTN_TENSOR. An invalid value raises on first use, not at import."""
    global _wrong_setting
    _wrong_setting = torch.ops.fattn._set_tensor_setting(os.environ.get("FATTN_TENSOR", ""))


def use_folder() -> None:
    """Sets the folder of verdicts. A verdict is valid for one build of the system and of the kernels."""
    try:
        folder = str(cache_folder())
    except RuntimeError:  # no home folder
        folder = ""
    torch.ops.fattn._set_tensor_folder(folder)


def check_setting(asker: str = "torch_fattn: ") -> None:
    if _wrong_setting:
        raise ValueError(asker + _wrong_setting)


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
