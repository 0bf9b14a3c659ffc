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
    verdicts,
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
    assert "untested" not in run.doctor
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


# An M4, whose row of `tune` says that prefills in float16 with heads of 64 are faster on tensor operations.
M4 = {"SOFTMETAL_GPU_FAMILY": "9", "SOFTMETAL_TENSOR_LAYOUT": "blocks8"}
TUNED = """
from tests.helpers.tuned import PROVENANCE, tensor_row, this_chip
from torch_fattn.tuning.tuned_file import set_tuning

set_tuning(this_chip(), [tensor_row({macos!r})], PROVENANCE)
for dim in (64, 128):
    query = torch.empty(1, 4, 70, dim, device="mps", dtype=torch.float16)
    found[str(dim)] = torch_fattn.explain("prefill", query, query, query).data.get("tensor")
"""
(TENSOR,), (SIMDGROUP,) = TENSORS[PREFILL], SIMDGROUPS[PREFILL]


def test_a_gpu_before_m5_where_they_were_faster(machines: Machines, tmp_path: Path) -> None:
    tuned = Run(environment=M4, python=TUNED.format(macos="26.2"))
    run = machines.run(tmp_path, replace(tuned, calls=[{}, {"dim": 128}, {"call": BACKWARD}]))
    assert run.states == {"prefill float16 64": "registers"} and run.why == "passed the self-test"
    assert run.launches == {TENSOR: 1, SIMDGROUP: 1} | once(SIMDGROUPS[BACKWARD])
    assert run.all_launches[PROBE] == 1 and len(verdicts(tmp_path)) == 1
    assert "  prefill float16 64                           registers    passed the self-test\n" in run.doctor
    assert "  all others                                   off          GPUs before M5" in run.doctor
    assert run.found == {
        "64": "not tested yet on this GPU: tuned by a test",
        "128": "off for this dtype and head size: no timing on this GPU found them faster",
    }

    run = machines.run(tmp_path, tuned)
    assert run.launches == {TENSOR: 1} and PROBE not in run.all_launches
    assert run.found["64"] == "used; scores stay in registers: passed the self-test; tuned by a test"
    control = machines.run(tmp_path, replace(tuned, python=""))
    assert control.launches == {SIMDGROUP: 1} and not control.states
    assert "`python -m torch_fattn tune` turns them on for prefills that gain" in control.off

    failing = replace(tuned, faults=[{"kernel": TENSOR, "fails": True}])
    run = machines.run(tmp_path / "other", failing)
    assert run.hits[0] > 0 and run.launches == {SIMDGROUP: 1} and run.states == {"prefill float16 64": "off"}


@pytest.mark.parametrize(
    ("setting", "kernel", "why"),
    [
        ("", "fattn_decode_wide", "only prefills were timed on this GPU"),
        ("registers", TENSOR, "used; scores stay in registers: FATTN_TENSOR, without a self-test"),
    ],
)
def test_decodes_before_m5(machines: Machines, tmp_path: Path, setting: str, kernel: str, why: str) -> None:
    """They stay on simdgroup matrices unless a variant is set by hand."""
    decode = """
draft, key = (torch.randn(1, *size, 64, device="mps", dtype=torch.float16) for size in ((16, 3), (2, 70)))
torch_fattn.prefill(key, key, key)
plan = torch_fattn.explain("decode", draft, key, key)
found["plan"] = plan.passes[0]["kernel"], plan.data["tensor"]
found["finite"] = torch_fattn.decode(draft, key, key).isfinite().all().item()
"""
    environment = {**M4, "FATTN_TENSOR": setting}
    run = machines.run(tmp_path, Run([], environment=environment, python=TUNED.format(macos="26.2") + decode))
    assert run.found["plan"] == [kernel, why] and run.found["finite"]
    assert run.all_launches.get(kernel, 0) > 0


@pytest.mark.parametrize(
    ("macos", "timed", "environment"),
    [
        ("26.1", "26.1", {}),
        ("15.5", "15.5", {}),
        ("26.3", "26.2", {}),  # an update brought another compiler
        ("26.2", "26.2", {"FATTN_TENSOR": "0"}),
    ],
)
def test_a_row_that_changes_nothing(
    machines: Machines, tmp_path: Path, macos: str, timed: str, environment: dict[str, str]
) -> None:
    environment = {**M4, "SOFTMETAL_MACOS": macos, **environment}
    run = machines.run(tmp_path, Run(environment=environment, python=TUNED.format(macos=timed)))
    assert run.launches == {SIMDGROUP: 1} and not run.states and run.off
    assert not {PROBE, TENSOR} & {*run.all_launches} and run.found["64"] is None
    assert f"tensor operations  off: {run.off}" in run.doctor


def test_a_wrong_setting(machines: Machines, tmp_path: Path) -> None:
    python = """
query = torch.randn(1, 2, 64, 64, device="mps", dtype=torch.float16)
lse = query.float().logsumexp(3)
draft = torch.randn(1, 16, 3, 64, device="mps", dtype=torch.float16)
for call in ("prefill(query, query, query)", "explain('prefill', query, query, query)", "install()",
             "prefill_backward(query, None, query, query, query, query, lse, out_remainder=query)",
             "decode(draft, query, query)"):
    try:
        eval("torch_fattn." + call)
    except ValueError as error:
        found[call] = str(error).splitlines()[0]
found["decode"] = list(torch_fattn.decode(query[:, :, :1], query, query).shape)
torch_fattn.prefill(query.float(), query.float(), query.float())
"""
    run = machines.run(tmp_path, Run(calls=[], python=python, environment={"FATTN_TENSOR": "1"}))
    fault = (
        "FATTN_TENSOR is '1' and must be 0, threadgroup or registers; unset it for what the self-test finds"
    )
    assert run.found.pop("decode") == [1, 2, 1, 64]
    assert len(run.found) == 5
    assert all(text.endswith(fault) for text in run.found.values()), run.found
