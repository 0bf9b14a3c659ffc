"""What closes the gates of Metal 4's tensor operations, and FATTN_TENSOR, on simulated machines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.conftest import needs_emulator
from tests.helpers.tensor_machines import (
    BACKWARD,
    CALLS,
    PREFILL,
    PROBE,
    REGISTERS,
    SIMDGROUPS,
    TENSORS,
    Machines,
    Run,
    once,
)

pytestmark = needs_emulator

BOTH = [{"call": call} for call in CALLS]
TENSOR_LAUNCHES = once(TENSORS[PREFILL] + TENSORS[BACKWARD])
SIMDGROUP_LAUNCHES = once(SIMDGROUPS[PREFILL] + SIMDGROUPS[BACKWARD])


@pytest.mark.parametrize(
    ("environment", "off"),
    [
        ({"SOFTMETAL_MACOS": ""}, "this system is not macOS 26.2 or newer"),
        ({"SOFTMETAL_MACOS": "26.1"}, "macOS 26.1 is not macOS 26.2 or newer"),
        ({"SOFTMETAL_GPU_FAMILY": "9"}, "GPUs before M5 have no units for them: this is of Apple family 9"),
        ({"FATTN_TENSOR": "0"}, "FATTN_TENSOR=0"),
        ({"FATTN_TENSOR": "registers", "SOFTMETAL_MACOS": "26.1"}, "macOS 26.1 is not macOS 26.2 or newer"),
    ],
)
def test_gates(machines: Machines, tmp_path: Path, environment: dict[str, str], off: str) -> None:
    run = machines.run(tmp_path, Run(calls=BOTH, environment=environment))
    assert run.off.startswith(off)
    assert f"tensor operations  off: {off}" in run.doctor
    assert run.launches == SIMDGROUP_LAUNCHES
    assert not {PROBE, *TENSOR_LAUNCHES} & {*run.all_launches}, (
        "behind a closed gate nothing is compiled or launched"
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("variant", ["threadgroup", "registers"])
@pytest.mark.parametrize("machine", [{}, {"SOFTMETAL_GPU_FAMILY": "8", "SOFTMETAL_MACOS": ""}])
def test_a_variant_by_hand(machines: Machines, tmp_path: Path, variant: str, machine: dict[str, str]) -> None:
    run = machines.run(tmp_path, Run(calls=BOTH, environment={"FATTN_TENSOR": variant, **machine}))
    assert (run.state, run.why) == (variant, "FATTN_TENSOR, without a self-test")
    assert run.states["backward float16 64"] == variant
    assert run.launches == TENSOR_LAUNCHES and run.all_launches == TENSOR_LAUNCHES
    assert "untested     the first prefill of a size compiles it" in run.doctor
    assert not list(tmp_path.iterdir()), "it says nothing about other runs"


@pytest.mark.parametrize("call", CALLS)
def test_a_variant_by_hand_that_does_not_compile(machines: Machines, tmp_path: Path, call: str) -> None:
    by_hand = Run(calls=[{"call": call}], environment={"FATTN_TENSOR": "registers"})
    kernel = TENSORS[call][-1]
    fault = {"kernel": kernel, "fails": True}
    run = machines.run(tmp_path, replace(by_hand, faults=[{**fault, "macro": REGISTERS}]))
    assert run.hits[0] > 0 and run.state == "threadgroup" and run.launches == once(TENSORS[call])
    assert f"registers: the Metal compiler rejected {kernel.removeprefix('fattn_')}.metal" in run.why
    run = machines.run(tmp_path, replace(by_hand, faults=[fault]))
    assert run.hits[0] > 0 and run.state == "off" and run.launches == once(SIMDGROUPS[call])


def test_a_wrong_setting(machines: Machines, tmp_path: Path) -> None:
    python = """
query = torch.randn(1, 2, 64, 64, device="mps", dtype=torch.float16)
lse = query.float().logsumexp(3)
for call in ("prefill(query, query, query)", "explain('prefill', query, query, query)", "install()",
             "prefill_backward(query, None, query, query, query, None, lse)"):
    try:
        eval("torch_fattn." + call)
    except ValueError as error:
        found[call] = str(error).splitlines()[0]
found["decode"] = list(torch_fattn.decode(query[:, :, :1], query, query).shape)
"""
    run = machines.run(tmp_path, Run(calls=[], python=python, environment={"FATTN_TENSOR": "1"}))
    fault = (
        "FATTN_TENSOR is '1' and must be 0, threadgroup or registers; unset it for what the self-test finds"
    )
    assert run.found.pop("decode") == [1, 2, 1, 64]
    assert len(run.found) == 4
    assert all(text.endswith(fault) for text in run.found.values()), run.found
