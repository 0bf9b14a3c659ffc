"""What closes the gates of Metal 4's tensor operations, and FATTN_TENSOR, on simulated machines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import needs_emulator
from tests.helpers.tensor_machines import Machines, Run

pytestmark = needs_emulator

PROBE, TENSOR, SIMDGROUP = "fattn_tensor_probe", "fattn_prefill_tensor", "fattn_prefill"
REGISTERS = ("FATTN_REGISTERS", "1")


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    started = Machines()
    yield started
    started.stop()


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
    run = machines.run(tmp_path, Run(environment=environment))
    assert run.off.startswith(off)
    assert f"tensor operations  off: {off}" in run.doctor
    assert run.launches == {SIMDGROUP: 1}
    assert not {PROBE, TENSOR} & {*run.all_launches}, "behind a closed gate nothing is compiled or launched"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("variant", ["threadgroup", "registers"])
@pytest.mark.parametrize("machine", [{}, {"SOFTMETAL_GPU_FAMILY": "8", "SOFTMETAL_MACOS": ""}])
def test_a_variant_by_hand(machines: Machines, tmp_path: Path, variant: str, machine: dict[str, str]) -> None:
    run = machines.run(tmp_path, Run(environment={"FATTN_TENSOR": variant, **machine}))
    assert (run.state, run.why) == (variant, "FATTN_TENSOR, without a self-test")
    assert run.launches == {TENSOR: 1} and run.all_launches == {TENSOR: 1}
    assert "float16 128             untested     the first prefill of this size compiles it" in run.doctor
    assert not list(tmp_path.iterdir()), "it says nothing about other runs"


def test_a_variant_by_hand_that_does_not_compile(machines: Machines, tmp_path: Path) -> None:
    environment = {"FATTN_TENSOR": "registers"}
    fault = {"kernel": TENSOR, "fails": True}
    run = machines.run(tmp_path, Run(environment=environment, faults=[{**fault, "macro": REGISTERS}]))
    assert run.hits[0] > 0 and run.state == "threadgroup" and run.launches == {TENSOR: 1}
    assert "registers: the Metal compiler rejected prefill_tensor.metal" in run.why
    run = machines.run(tmp_path, Run(environment=environment, faults=[fault]))
    assert run.hits[0] > 0 and run.state == "off" and run.launches == {SIMDGROUP: 1}


def test_a_wrong_setting(machines: Machines, tmp_path: Path) -> None:
    python = """
query = torch.randn(1, 2, 64, 64, device="mps", dtype=torch.float16)
for call in ("prefill(query, query, query)", "explain('prefill', query, query, query)", "install()"):
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
    assert len(run.found) == 3
    assert all(text.endswith(fault) for text in run.found.values()), run.found
