"""Failures of the self-test of tensor operations on a simulated M5: each that can be simulated ends in right
results with the next lower variant, and a reason. Every run checks its results against float64; the hits of a
fault show that it reached the kernels."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

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
    other,
    verdicts,
)

pytestmark = needs_emulator

(TENSOR,), (SIMDGROUP,) = TENSORS[PREFILL], SIMDGROUPS[PREFILL]
QUERY, KEY = TENSORS[BACKWARD]
OUT, LSE, PARTIAL_OUT, GRAD_KEY, GRAD_VALUE = 3, 4, 9, 28, 29  # slots of kernels/common/params.h
WRONG_OUT = {"slot": OUT, "bits": 0x40004000, "byte": 64}  # two halfs below 1 become large
WRONG_LSE = {"slot": LSE, "bits": 1 << 30, "byte": 128}
# The large problem has the most threadgroups among those whose keys are cut into parts.
WRONG_PART = {"slot": PARTIAL_OUT, "bits": 1 << 30, "byte": 64, "least_groups": 16}


# Faults of the variant `registers`, and the reason that doctor gives for it.
FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "does not compile": (
        {"kernel": TENSOR, "fails": True},
        "registers: the Metal compiler rejected prefill_tensor.metal with",
    ),
    "probe does not compile": (
        {"kernel": PROBE, "fails": True},
        "registers: the Metal compiler rejected tensor_probe.metal with",
    ),
    "too many registers": (
        {"kernel": TENSOR, "max_threads": 96},
        "registers: fattn_prefill_tensor needs 128 threads per threadgroup and this GPU runs it with at most "
        "96",
    ),
    "wrong probe": (
        {"kernel": PROBE, "flip": {"slot": OUT, "bits": 1, "byte": 32}},  # the column of the first element
        "registers: the probe does not find each element of a product in one lane",
    ),
    "wrong small result": (
        {"kernel": TENSOR, "flip": WRONG_OUT},
        "registers: in a causal problem of 83 rows its out differs by",
    ),
    "wrong log-sum-exp": (
        {"kernel": TENSOR, "flip": WRONG_LSE},
        "registers: in a causal problem of 83 rows its lse differs by",
    ),
    "wrong large result": (
        {"kernel": TENSOR, "flip": WRONG_PART},
        "registers: in a problem of 1,024 rows and 2,048 keys its out differs by",
    ),
}
BACKWARD_FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "the pass over rows does not compile": (
        {"kernel": QUERY, "fails": True},
        "registers: the Metal compiler rejected backward_query_tensor.metal with",
    ),
    "the pass over keys does not compile": (
        {"kernel": KEY, "fails": True},
        "registers: the Metal compiler rejected backward_key_tensor.metal with",
    ),
    "too many registers": (
        {"kernel": KEY, "max_threads": 96},
        "registers: fattn_backward_key_tensor needs 256 threads per threadgroup and this GPU runs it with at "
        "most 96",
    ),
    "wrong probe": FAULTS["wrong probe"],
    "wrong gradient of the query": (
        {"kernel": QUERY, "flip": WRONG_OUT},
        "registers: in a causal problem of 83 rows its grad_query differs by",
    ),
    "wrong gradient of the key": (
        {"kernel": KEY, "flip": {**WRONG_OUT, "slot": GRAD_KEY}},
        "registers: in a causal problem of 83 rows its grad_key differs by",
    ),
    "wrong gradient of the value": (
        {"kernel": KEY, "flip": {**WRONG_OUT, "slot": GRAD_VALUE}},
        "registers: in a causal problem of 83 rows its grad_value differs by",
    ),
    "wrong large result": (
        {"kernel": KEY, "flip": {**WRONG_OUT, "slot": GRAD_VALUE, "least_groups": 16}},
        "registers: in a problem of 1,024 rows and 2,048 keys its grad_value differs by",
    ),
}
FAULTS_OF_CALLS = [(PREFILL, name) for name in FAULTS] + [(BACKWARD, name) for name in BACKWARD_FAULTS]
# One that is raised, and one that is found; what follows passes the whole self-test of the other variant.
FAULTS_OF_REGISTERS = [
    (PREFILL, "does not compile"),
    (PREFILL, "wrong large result"),
    (BACKWARD, "wrong gradient of the key"),
]


def fault_of(call: str, name: str) -> tuple[dict[str, Any], str]:
    return (FAULTS if call == PREFILL else BACKWARD_FAULTS)[name]


@pytest.mark.parametrize(("call", "name"), FAULTS_OF_REGISTERS)
def test_a_fault_of_registers_leaves_threadgroup_memory(
    machines: Machines, tmp_path: Path, call: str, name: str
) -> None:
    fault, why = fault_of(call, name)
    run = machines.run(tmp_path, Run(calls=[{"call": call}], faults=[{**fault, "macro": REGISTERS}]))
    assert run.hits[0] > 0, "the fault did not reach the self-test"
    assert run.state == "threadgroup", run.why
    assert run.why.startswith(f"passed the self-test; {why}")
    assert why in run.doctor
    assert run.launches == once(TENSORS[call])


@pytest.mark.parametrize(("call", "name"), FAULTS_OF_CALLS)
def test_a_fault_of_both_leaves_the_simdgroup_kernels(
    machines: Machines, tmp_path: Path, call: str, name: str
) -> None:
    fault, why = fault_of(call, name)
    if "max_threads" in fault:  # the other variant has fewer threads
        fault = {**fault, "max_threads": 32}
        why = why.replace("96", "32")
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


def test_a_fault_of_decodes_alone(machines: Machines, tmp_path: Path) -> None:
    """Their tiles have fewer groups of rows. They share the verdict of prefills."""
    flip = {key: WRONG_PART[key] for key in ("slot", "bits", "byte")}
    fault = {"kernel": TENSOR, "macro": ("FATTN_ROW_GROUPS", "2"), "flip": flip}
    run = machines.run(tmp_path, Run(faults=[fault]))
    assert run.hits == [2], "one of each variant"
    assert run.state == "off" and run.launches == once(SIMDGROUPS[PREFILL])
    assert run.why.startswith("registers: in a decode of 24 rows its out differs by")
    assert "; threadgroup: in a decode of 24 rows its out differs by" in run.why


def test_scores_incompatible_with_the_left_operand(machines: Machines, tmp_path: Path) -> None:
    flip = {"slot": OUT, "bits": 1, "byte": 20}  # the sixth fact of the probe
    run = machines.run(tmp_path, Run(faults=[{"kernel": PROBE, "macro": REGISTERS, "flip": flip}]))
    assert run.hits == [1]
    assert run.why == "passed the self-test; registers: scores are not laid out like a left operand"
    assert (run.state, run.launches) == ("threadgroup", {TENSOR: 1})


def test_a_slow_compiler(machines: Machines, tmp_path: Path) -> None:
    run = machines.run(tmp_path, Run(faults=[{"kernel": PROBE, "macro": REGISTERS, "delay": 20.5}]))
    assert run.hits == [1]
    assert run.state == "threadgroup"
    assert "registers: it took 2" in run.why and "s to compile (at most 20)" in run.why
    assert run.launches == {TENSOR: 1}


COMPILED = """
import time
torch.set_num_threads(THREADS)
half = torch.randn(1, 2, 64, 64, device="mps", dtype=torch.float16)
with softmetal.fault(kernel="fattn_prefill_tensor", delay=DELAY):
    start = time.perf_counter()
    torch_fattn.prefill(half, half, half)
    found["seconds"] = time.perf_counter() - start
found["compiled"] = sum(kernel.library_seconds for kernel in torch_fattn.compiled_kernels())
"""


@pytest.mark.parametrize(("threads", "delay"), [(8, 5.0), (1, 0.1)])
def test_kernels_compile_side_by_side(machines: Machines, tmp_path: Path, threads: int, delay: float) -> None:
    """On as many threads as torch has: then the compilers together take longer than the call."""
    run = machines.run(tmp_path, Run([], python=f"THREADS, DELAY = {threads}, {delay}{COMPILED}"))
    assert run.state == "registers", run.why
    assert (run.found["compiled"] > run.found["seconds"]) == (threads > 1), run.found


ALL_FIT, NOTHING_FITS = "all fits, a new one", "nothing fits, a new one"
# A layout, the state that it allows, and words of the reason.
LAYOUTS = {
    "blocks8": ("blocks8", "registers", "passed"),
    "nothing fits": ("random:4", "threadgroup", "elements do not match the rows of a reduction"),
    "not the operand": ("random:5", "threadgroup", "a lane has more elements than the kernel keeps track of"),
    "all fits": ("random:6", "registers", "passed"),
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
    if call == PREFILL:
        assert machines.run(tmp_path, Run()).state == "registers"


def test_a_pipeline_that_the_self_test_does_not_have(machines: Machines, tmp_path: Path) -> None:
    """A call with other options has another pipeline, which may fail alone."""
    python = """
half = torch.randn(1, 2, 64, 64, device="mps", dtype=torch.float16)
torch_fattn.prefill(half, half, half)
found["used"] = torch_fattn.launch_counts()["fattn_prefill_tensor"]
"""
    faults = [{"kernel": TENSOR, "max_threads": 32}]
    run = machines.run(tmp_path, Run(calls=[{"options": {"softcap": 3.0}}], python=python, faults=faults))
    assert run.found["used"] == 1, "the size passed the self-test"
    assert run.hits == [1] and run.launches == {SIMDGROUP: 1}
    assert run.state == "off" and run.why.startswith(f"{TENSOR} needs 128 threads")
