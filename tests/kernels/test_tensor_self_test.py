"""The self-test of Metal 4's tensor operations on a simulated M5: it picks the variant, each failure that can
be simulated ends in right results with the next lower one and a reason, and the verdict is kept. Every run
checks its results against float64; a fault's hits show that it reached the kernels."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import needs_emulator
from tests.helpers.tensor_machines import Machines, Outcome, Run

pytestmark = needs_emulator

PROBE, TENSOR, SIMDGROUP = "fattn_tensor_probe", "fattn_prefill_tensor", "fattn_prefill"
OUT, LSE, PARTIAL_OUT = 3, 4, 9  # slots of kernels/common/params.h
REGISTERS = ("FATTN_REGISTERS", "1")
WRONG_OUT = {"slot": OUT, "bits": 0x40004000, "byte": 64}  # two halfs below 1 become large
WRONG_LSE = {"slot": LSE, "bits": 1 << 30, "byte": 128}
# Only the large problem has so few tiles, for so many keys, that they are cut into parts.
WRONG_PART = {"slot": PARTIAL_OUT, "bits": 1 << 30, "byte": 64}


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    started = Machines()
    yield started
    started.stop()


def verdicts(cache: Path) -> list[Path]:
    return sorted(cache.glob("tensor-*.txt"))


def test_registers_pass_on_the_layout_of_m5(machines: Machines, tmp_path: Path) -> None:
    first = machines.run(tmp_path, Run())
    assert (first.state, first.why, first.off) == ("registers", "passed the self-test", "")
    assert first.launches == {TENSOR: 1}
    assert first.all_launches[PROBE] == 1 and first.all_launches[SIMDGROUP] > 0
    assert "float16 64              registers    passed the self-test\n" in first.doctor
    assert "float16 128             untested     the first prefill" in first.doctor
    assert len(verdicts(tmp_path)) == 1

    again = machines.run(tmp_path, Run())
    assert (again.state, again.launches) == ("registers", {TENSOR: 1})
    assert PROBE not in again.all_launches and SIMDGROUP not in again.all_launches


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("dim", [96, 128, 256])
def test_every_size_has_its_own_verdict(machines: Machines, tmp_path: Path, dtype: str, dim: int) -> None:
    run = machines.run(tmp_path, Run(calls=[{"dtype": dtype, "dim": dim}]))
    assert (run.state, run.launches) == ("registers", {TENSOR: 1}), run.why
    assert run.doctor.count("untested") == 9


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


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_registers_leaves_threadgroup_memory(
    machines: Machines, tmp_path: Path, name: str
) -> None:
    fault, why = FAULTS[name]
    run = machines.run(tmp_path, Run(faults=[{**fault, "macro": REGISTERS}]))
    assert run.hits[0] > 0, "the fault did not reach the self-test"
    assert run.state == "threadgroup", run.why
    assert run.why.startswith(f"passed the self-test; {why}")
    assert why in run.doctor
    assert run.launches == {TENSOR: 1}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_both_leaves_the_simdgroup_kernels(machines: Machines, tmp_path: Path, name: str) -> None:
    fault, why = FAULTS[name]
    if "max_threads" in fault:  # the other variant has fewer threads
        fault = {**fault, "max_threads": 32}
        why = why.replace("96", "32")
    run = machines.run(tmp_path, Run(faults=[fault]))
    assert run.hits[0] > 1, "the fault did not reach both variants"
    assert run.state == "off", run.why
    assert run.why.startswith(why) and "; threadgroup: " in run.why
    assert "-> tensor operations of float16 64 failed the self-test: please report it" in run.doctor
    assert run.launches == {SIMDGROUP: 1}
    again = machines.run(tmp_path, Run())  # the GPU is well again, but the verdict is kept
    assert (again.state, again.why, again.launches) == ("off", run.why, {SIMDGROUP: 1})


def test_scores_that_are_no_left_operand(machines: Machines, tmp_path: Path) -> None:
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
    assert run.used_tensors


@pytest.mark.parametrize(
    ("layout", "state", "why"),
    [
        ("blocks8", "registers", "passed"),
        ("random:4", "threadgroup", "registers: elements do not match the rows of a reduction"),
        ("random:5", "threadgroup", "registers: a lane has more elements than the kernel keeps track of"),
        ("random:6", "registers", "passed"),
        (f"random:{4 * random.randrange(1 << 40) + 2}", "registers", "passed"),
        (f"random:{4 * random.randrange(1 << 40)}", "threadgroup", "do not match the rows"),
    ],
    ids=[
        "blocks8",
        "nothing fits",
        "not the operand",
        "all fits",
        "all fits, a new one",
        "nothing fits, a new one",
    ],
)
def test_layouts(machines: Machines, tmp_path: Path, layout: str, state: str, why: str) -> None:
    run = machines.run(tmp_path, Run(environment={"SOFTMETAL_TENSOR_LAYOUT": layout}))
    assert run.state == state, run.why
    assert why in run.why
    assert run.launches == {TENSOR: 1}


@pytest.mark.parametrize(
    "change",
    [
        lambda text: "",
        lambda text: text[:-1],
        lambda text: text.replace("state registers", "state threadgroup"),
        lambda text: text.replace("format 1", "format 2"),
        lambda text: text + text,
        lambda text: "\0" * len(text),
    ],
    ids=["empty", "cut", "edited", "another format", "twice", "zeros"],
)
def test_a_damaged_file_is_none(machines: Machines, tmp_path: Path, change: Any) -> None:
    machines.run(tmp_path, Run())
    (file,) = verdicts(tmp_path)
    whole = file.read_text()
    file.write_text(change(whole))
    run = machines.run(tmp_path, Run())
    assert run.all_launches[PROBE] == 1 and run.state == "registers"
    assert file.read_text() == whole, "it is written again"


@pytest.mark.parametrize(
    "environment",
    [{"SOFTMETAL_MACOS_BUILD": "25C57"}, {"SOFTMETAL_GPU_CORES": "20"}],
    ids=["another build of macOS", "another GPU"],
)
def test_what_a_verdict_belongs_to(machines: Machines, tmp_path: Path, environment: dict[str, str]) -> None:
    machines.run(tmp_path, Run())
    run = machines.run(tmp_path, Run(environment=environment))
    assert run.all_launches[PROBE] == 1 and run.state == "registers"
    assert len(verdicts(tmp_path)) == 2
    assert PROBE not in machines.run(tmp_path, Run()).all_launches, "the first one is as good as before"


def test_a_folder_that_cannot_be_written(machines: Machines, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    run = machines.run(tmp_path / "file" / "folder", Run())
    assert (run.state, run.launches) == ("registers", {TENSOR: 1})


def test_a_fault_of_the_gpu_is_not_kept(machines: Machines, tmp_path: Path) -> None:
    """The GPU stops the kernels of both variants, as it does if it hangs; the next process tests again."""
    run = machines.run(tmp_path, Run(faults=[{"kernel": TENSOR, "stops": True}]))
    assert run.hits == [2], "the fault did not reach both variants"
    assert run.state == "off" and run.launches == {SIMDGROUP: 1}
    assert "registers: " in run.why and "an injected fault stopped kernel 'fattn_prefill_tensor'" in run.why
    assert not verdicts(tmp_path)
    assert machines.run(tmp_path, Run()).state == "registers"


# Calls and traces that do not run the self-test.
UNTESTED = """
import torch._subclasses.fake_tensor as fake
from torch.fx.experimental.proxy_tensor import make_fx
from torch_fattn.runtime import tensor_units

half = torch.randn(1, 2, 64, 64, device="mps", dtype=torch.float16)
torch_fattn.decode(half[:, :, :1], half, half)
torch_fattn.decode(half[:, :, :8], half, half)
torch_fattn.prefill(half.float(), half.float(), half.float())
torch_fattn.prefill(half[..., :40], half[..., :40], half[..., :40])
torch_fattn.prefill(half[:, :, :8], half, half)
torch_fattn.explain("prefill", half, half, half)
tokens, tables = half[0].transpose(0, 1)[:2], torch.tensor([[0], [0]], device="mps", dtype=torch.int32)
lengths, starts = (torch.tensor(n, device="mps", dtype=torch.int32) for n in ([60, 30], [0, 1, 2]))
pool = half.transpose(1, 2).contiguous()
torch_fattn.paged_prefill(tokens.contiguous(), pool, pool, tables, lengths, starts, max_seqlen_q=1)
torch_fattn.prefill(half.cpu(), half.cpu(), half.cpu())
torch_fattn.install()
with fake.FakeTensorMode() as mode:
    faked = torch.empty(1, 2, 64, 64, device="mps", dtype=torch.float16)
    torch_fattn.prefill(faked, faked, faked)
    torch.nn.functional.scaled_dot_product_attention(faked, faked, faked)
graph = make_fx(torch.nn.functional.scaled_dot_product_attention, tracing_mode="fake")(half, half, half)
found["graph"] = graph.code
torch_fattn.uninstall()
found["states"] = sorted({each.state for each in tensor_units.states()})
found["launches"] = softmetal.launches()
found["result"] = graph(half, half, half).float().isnan().any().item()
"""


def test_what_does_not_run_it(machines: Machines, tmp_path: Path) -> None:
    run = machines.run(tmp_path, Run(calls=[], python=UNTESTED))
    assert run.found["states"] == ["untested"]
    assert PROBE not in run.found["launches"] and run.found["launches"][SIMDGROUP] > 0
    assert "torch.ops.fattn.prefill" in run.found["graph"], "a traced call is ours until the test has run"
    assert run.state == "registers" and run.found["result"] is False, "the graph's operator ran the test"


COMPILED = """
def attend(query):
    return torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)

half = torch.randn(1, 2, 64, 64, device="mps", dtype=torch.float16)
with torch_fattn.installed():
    found["error"] = (torch.compile(attend, backend="aot_eager")(half) - attend(half)).abs().max().item()
found["launches"] = {name: count for name, count in torch_fattn.launch_counts().items() if count}
"""


def test_torch_compile(machines: Machines, tmp_path: Path) -> None:
    run = machines.run(tmp_path, Run(calls=[], python=COMPILED))
    assert run.found["error"] == 0.0
    assert run.found["launches"] == {TENSOR: 2}
    assert run.state == "registers"


# What surrounds the first call does not see the self-test.
SURROUNDED = """
from torch.utils._python_dispatch import TorchDispatchMode

class Seen(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        found.setdefault("seen", []).append(str(function))
        return function(*arguments, **(keywords or {}))

half = torch.randn(1, 2, 64, 64, device="mps", dtype=torch.float16, requires_grad=True)
states = torch.get_rng_state(), torch.mps.get_rng_state()
pending = half.detach() * 2  # encoded on the stream
with Seen(), torch.autocast("mps", dtype=torch.float16):
    out = torch_fattn.attention(half, half, half)
found["first"] = found.pop("seen")
with Seen(), torch.autocast("mps", dtype=torch.float16):
    torch_fattn.attention(half, half, half)
out.float().sum().backward()
found["gradient"] = bool(half.grad.float().abs().sum() > 0)
found["generators"] = [torch.equal(a, b) for a, b in
                       zip(states, (torch.get_rng_state(), torch.mps.get_rng_state()))]
found["pending"] = torch.equal(pending.cpu(), half.detach().cpu() * 2)
found["used"] = torch_fattn.launch_counts()["fattn_prefill_tensor"]
"""


def test_what_surrounds_it(machines: Machines, tmp_path: Path) -> None:
    run = machines.run(tmp_path, Run(calls=[], python=SURROUNDED))
    assert run.all_launches[PROBE] == 1 and run.found["used"] == 2
    assert run.found["first"] == run.found["seen"], "a mode sees the same calls with and without the test"
    assert run.found["gradient"] and run.found["generators"] == [True, True] and run.found["pending"]


@pytest.mark.parametrize(
    "around",
    ["torch.inference_mode()", "torch.no_grad()", "torch.autocast('mps', dtype=torch.float16)"],
)
def test_contexts(machines: Machines, tmp_path: Path, around: str) -> None:
    python = f"""
half = torch.randn(1, 2, 64, 64, device="mps", dtype=torch.float16)
with {around}:
    torch_fattn.prefill(half, half, half)
"""
    run = machines.run(tmp_path, Run(python=python))
    assert run.state == "registers" and run.all_launches[PROBE] == 1


def test_vmap(machines: Machines, tmp_path: Path) -> None:
    python = """
half = torch.randn(3, 1, 2, 64, 64, device="mps", dtype=torch.float16)
one_by_one = torch.vmap(lambda q: torch_fattn.prefill(q, q, q))(half)
found["error"] = (one_by_one - torch.stack([torch_fattn.prefill(q, q, q) for q in half])).abs().max().item()
"""
    run = machines.run(tmp_path, Run(calls=[], python=python))
    assert run.found["error"] == 0.0 and run.state == "registers"


THREADS = """
from concurrent.futures import ThreadPoolExecutor

half = torch.randn(1, 2, 80, 64, device="mps", dtype=torch.float16)
with ThreadPoolExecutor(4) as pool:
    results = list(pool.map(lambda _: torch_fattn.prefill(half, half, half).cpu(), range(8)))
found["equal"] = all(torch.equal(results[0], each) for each in results)
found["launches"] = torch_fattn.launch_counts()
"""


def test_threads_test_once(machines: Machines, tmp_path: Path) -> None:
    run = machines.run(tmp_path, Run(calls=[], python=THREADS))
    assert run.all_launches[PROBE] == 1, "of one variant"
    assert run.found["equal"] and run.found["launches"][TENSOR] == 8


def test_processes_write_one_file(machines: Machines, tmp_path: Path) -> None:
    others = Machines()
    try:
        with ThreadPoolExecutor(2) as pool:
            runs: list[Outcome] = list(pool.map(lambda each: each.run(tmp_path, Run()), (machines, others)))
    finally:
        others.stop()
    assert [run.state for run in runs] == ["registers"] * 2
    assert len(verdicts(tmp_path)) == 1 and not list(tmp_path.glob(".tensor-*"))
    assert PROBE not in machines.run(tmp_path, Run()).all_launches


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


@pytest.mark.parametrize("fails", [False, True])
def test_install_waits_for_the_verdict(machines: Machines, tmp_path: Path, fails: bool) -> None:
    """Where torch runs on tensor units, too: without them, its own prefill would be the faster one."""
    if torch.__version__ < "2.14":
        pytest.skip("torch has tensor kernels from 2.14 on")
    faults = [{"kernel": TENSOR, "fails": True}] if fails else []
    run = machines.run(tmp_path, Run(calls=[{"sdpa": True, "is_causal": False}], faults=faults))
    assert run.state == ("off" if fails else "registers")
    assert run.launches == ({} if fails else {TENSOR: 1})


def test_warmup_runs_it(machines: Machines, tmp_path: Path) -> None:
    python = """
torch_fattn.warmup("prefill", heads=4, kv_len=128, head_dim=64, dtype=torch.float16)
found["kernels"] = [each.kernel for each in torch_fattn.compiled_kernels()]
"""
    run = machines.run(tmp_path, Run(python=python))
    assert run.state == "registers" and TENSOR in run.found["kernels"]
    assert run.launches == {TENSOR: 1}
