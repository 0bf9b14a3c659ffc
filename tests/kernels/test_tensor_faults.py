"""Failures of the self-test of tensor operations on a simulated M5: each that can be simulated ends in right
results with the next lower variant, and a reason. Every run checks its results against float64; the hits of a
fault show that it reached the kernels."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import needs_emulator
from tests.helpers.direct_launch import SLOTS
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
    other,
    verdicts,
)

pytestmark = needs_emulator

(TENSOR,), (SIMDGROUP,) = TENSORS[PREFILL], SIMDGROUPS[PREFILL]
QUERY, KEY = TENSORS[BACKWARD]
OUT, LSE, PARTIAL_OUT, GRAD_KEY, GRAD_VALUE = (
    SLOTS[name] for name in ("out", "lse", "partial_out", "grad_key", "grad_value")
)
WRONG = {"bits": 0x40004000, "byte": 64}  # two halfs below 1 become large
# Those of more threadgroups are the large problem's.
LARGE = {"least_groups": 16}
SMALL = "registers: in a causal prefill of 83 rows its"
# Faults of the variant `registers`, and the reason that doctor gives for it.
FAULTS: dict[tuple[str, str], tuple[dict[str, Any], str]] = {
    (PREFILL, "does not compile"): (
        {"kernel": TENSOR, "fails": True},
        "registers: the Metal compiler rejected prefill_tensor.metal with",
    ),
    (PREFILL, "too many registers"): (
        {"kernel": TENSOR, "max_threads": 32},
        "registers: fattn_prefill_tensor needs 128 threads per threadgroup and this GPU runs it with at most "
        "32",
    ),
    (PREFILL, "wrong probe"): (
        {"kernel": PROBE, "flip": {"slot": OUT, "bits": 1, "byte": 32}},  # the column of the first element
        "registers: the probe does not find each element of a product in one lane",
    ),
    (PREFILL, "wrong out"): ({"kernel": TENSOR, "flip": {"slot": OUT, **WRONG}}, f"{SMALL} out differs by"),
    (PREFILL, "wrong lse"): (
        {"kernel": TENSOR, "flip": {"slot": LSE, "bits": 1 << 30, "byte": 128}},
        f"{SMALL} lse differs by",
    ),
    (PREFILL, "wrong decode"): (  # whose tiles have fewer groups of rows
        {
            "kernel": TENSOR,
            "macro": ["FATTN_ROW_GROUPS", "2"],
            "flip": {"slot": PARTIAL_OUT, "bits": 1 << 30, "byte": 64},
        },
        "registers: in a decode of 24 rows its out differs by",
    ),
    (PREFILL, "wrong large problem"): (
        {"kernel": TENSOR, "flip": {"slot": PARTIAL_OUT, "bits": 1 << 30, "byte": 64, **LARGE}},
        "registers: in a problem of 1,024 rows and 2,048 keys its out differs by",
    ),
    (BACKWARD, "the pass over keys does not compile"): (
        {"kernel": KEY, "fails": True},
        "registers: the Metal compiler rejected backward_key_tensor.metal with",
    ),
    (BACKWARD, "wrong gradient of the query"): (
        {"kernel": QUERY, "flip": {"slot": OUT, **WRONG}},
        f"{SMALL} grad_query differs by",
    ),
    (BACKWARD, "wrong gradient of the key"): (
        {"kernel": KEY, "flip": {"slot": GRAD_KEY, **WRONG}},
        f"{SMALL} grad_key differs by",
    ),
    (BACKWARD, "wrong large problem"): (
        {"kernel": KEY, "flip": {"slot": GRAD_VALUE, **WRONG, **LARGE}},
        "registers: in a problem of 1,024 rows and 2,048 keys its grad_value differs by",
    ),
}


@pytest.mark.parametrize(("call", "name"), FAULTS)
def test_a_fault_of_both_leaves_the_simdgroup_kernels(
    machines: Machines, tmp_path: Path, call: str, name: str
) -> None:
    fault, why = FAULTS[call, name]
    calls = [{"call": call}]
    run = machines.run(tmp_path, Run(calls=calls, faults=[fault]))
    assert run.hits[0] > 1, "the fault did not reach both variants"
    assert run.state == "off", run.why
    assert run.why.startswith(why) and "; threadgroup: " in run.why
    assert f"-> tensor operations of {call} float16 64 failed the self-test: please report it" in run.doctor
    assert run.launches == once(SIMDGROUPS[call])
    assert run.states[f"{other(call)} float16 64"] == "untested"
    again = machines.run(tmp_path, Run(calls=calls))  # the GPU is well again, but the verdict is kept
    assert (again.state, again.why, again.launches) == ("off", run.why, once(SIMDGROUPS[call]))


# What follows passes the whole self-test of the other variant.
FAULTS_OF_REGISTERS = {
    "a slow compiler": (
        {"kernel": PROBE, "delay": 20.5},
        "registers: it took 2",
    ),
    "not the left operand": (
        {"kernel": PROBE, "flip": {"slot": OUT, "bits": 1, "byte": 20}},  # the sixth fact
        "registers: scores are not laid out like a left operand",
    ),
    "wrong gradient of the key": FAULTS[BACKWARD, "wrong gradient of the key"],
}


@pytest.mark.parametrize("name", FAULTS_OF_REGISTERS)
def test_a_fault_of_registers_leaves_threadgroup_memory(
    machines: Machines, tmp_path: Path, name: str
) -> None:
    fault, why = FAULTS_OF_REGISTERS[name]
    call = BACKWARD if fault["kernel"] == KEY else PREFILL
    run = machines.run(tmp_path, Run(calls=[{"call": call}], faults=[{**fault, "macro": REGISTERS}]))
    assert run.hits[0] > 0, "the fault did not reach the self-test"
    assert run.state == "threadgroup", run.why
    assert run.why.startswith(f"passed the self-test; {why}")
    assert why in run.doctor
    assert run.launches == once(TENSORS[call])


ALL_FIT, NOTHING_FITS = "all fits, a new one", "nothing fits, a new one"
# A layout, the state that it allows, and words of the reason.
LAYOUTS = {
    "blocks8": ("blocks8", "registers", "passed"),
    "not the operand": ("random:5", "threadgroup", "a lane has more elements than the kernel keeps track of"),
    ALL_FIT: (f"random:{4 * random.randrange(1 << 40) + 2}", "registers", "passed"),
    NOTHING_FITS: (f"random:{4 * random.randrange(1 << 40)}", "threadgroup", "do not match the rows"),
}


@pytest.mark.parametrize(
    ("call", "name"), [*((PREFILL, name) for name in LAYOUTS), (BACKWARD, ALL_FIT), (BACKWARD, NOTHING_FITS)]
)
def test_layouts(machines: Machines, tmp_path: Path, call: str, name: str) -> None:
    layout, state, why = LAYOUTS[name]
    run = machines.run(tmp_path, Run([{"call": call}], environment={"SOFTMETAL_TENSOR_LAYOUT": layout}))
    assert run.state == state, f"{layout}: {run.why}"
    assert why in run.why
    assert run.launches == once(TENSORS[call])


@pytest.mark.parametrize("call", CALLS)
def test_a_fault_of_the_gpu_is_not_kept(machines: Machines, tmp_path: Path, call: str) -> None:
    """The GPU stops the kernels of both variants, as it does if it hangs; the next process tests again."""
    kernel = TENSORS[call][0]
    run = machines.run(tmp_path, Run([{"call": call}], faults=[{"kernel": kernel, "stops": True}]))
    assert run.hits == [2], "the fault did not reach both variants"
    assert run.state == "off" and run.launches == once(SIMDGROUPS[call])
    assert "registers: " in run.why and f"an injected fault stopped kernel '{kernel}'" in run.why
    assert not verdicts(tmp_path)


def test_a_pipeline_that_the_self_test_does_not_have(machines: Machines, tested: Path) -> None:
    """A call with other options has another pipeline, which may fail to compile."""
    python = """
half = torch.randn(1, 2, 64, 64, device="mps", dtype=torch.float16)
torch_fattn.prefill(half, half, half)
found["used"] = torch_fattn.launch_counts()["fattn_prefill_tensor"]
"""
    faults = [{"kernel": TENSOR, "max_threads": 32}]
    run = machines.run(tested, Run(calls=[{"options": {"softcap": 3.0}}], python=python, faults=faults))
    assert run.found["used"] == 1, "the size passed the self-test"
    assert run.hits == [1] and run.launches == {SIMDGROUP: 1}
    assert run.state == "off" and run.why.startswith(f"registers: {TENSOR} needs 128 threads")
