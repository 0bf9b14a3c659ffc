"""The self-test of Metal 4's tensor operations on a simulated M5: when it runs, what sees it, and how its
verdict is kept. Every run checks its results against float64."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.conftest import needs_emulator
from tests.helpers.tensor_kernels import LATENT_KERNEL
from tests.helpers.tensor_machines import (
    BACKWARD,
    CALLS,
    PREFILL,
    PROBE,
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
DIMS = 96, 128, 256


def file_of(call: str, folder: Path) -> Path:
    """The verdict of the calls that machines run by default."""
    (file,) = (file for file in verdicts(folder) if f"size {call} float16 64\n" in file.read_text())
    return file


@pytest.mark.parametrize("call", CALLS)
def test_registers_pass_on_the_layout_of_m5(machines: Machines, tmp_path: Path, call: str) -> None:
    first = machines.run(tmp_path, Run(calls=[{"call": call}]))
    assert (first.state, first.why, first.off) == ("registers", "passed the self-test", "")
    assert first.launches == once(TENSORS[call])
    assert first.all_launches[PROBE] == 1
    assert all(first.all_launches[kernel] > 0 for kernel in SIMDGROUPS[call])
    name = f"{call} float16"
    assert f"  {name + ' 64':<44} registers    passed the self-test\n" in first.doctor
    others = "96, 128, 192, 256, 576" if call == PREFILL else "96, 128, 192, 256"
    assert f"  {f'{name} {others}':<44} untested     the first {call} of a size runs the" in first.doctor
    assert first.doctor.count("\n") == 7, "a line for the sizes of a call and dtype that have the same state"
    assert len(verdicts(tmp_path)) == 1

    again = machines.run(tmp_path, Run(calls=[{"call": call}]))
    assert (again.state, again.launches) == ("registers", once(TENSORS[call]))
    assert not {PROBE, *SIMDGROUPS[call]} & {*again.all_launches}


@pytest.mark.rotating
@pytest.mark.parametrize(("dtype", "call"), [*itertools.product(("float16", "bfloat16"), CALLS)])
def test_every_size_has_its_own_verdict(
    machines: Machines, tmp_path: Path, dtype: str, call: str, pytestconfig: pytest.Config
) -> None:
    """One of the head sizes runs; which one changes every day (`--third`)."""
    third, place = pytestconfig.getoption("--third"), CALLS.index(call) + (dtype == "float16")
    for dim in DIMS if third == "all" else (DIMS[(int(third) + place) % 3],):
        run = machines.run(tmp_path / str(dim), Run([{"call": call, "dtype": dtype, "dim": dim}]))
        assert (run.state, run.launches) == ("registers", once(TENSORS[call])), run.why
        assert list(run.states.values()).count("untested") == len(run.states) - 1 == 21


@pytest.mark.parametrize("fault", ["", "wrong out"])
def test_latent_heads_have_one_variant(machines: Machines, tmp_path: Path, fault: str) -> None:
    """Their verdict does not depend on what registers could do."""
    latent = [{"dim": 576, "rows": 20}]
    wrong = {"kernel": LATENT_KERNEL, "flip": {"slot": 3, "bits": 0x40004000, "byte": 64}}
    run = machines.run(tmp_path, Run(latent, faults=[wrong] if fault else []))
    if fault:
        assert run.state == "off" and run.launches == once(("fattn_prefill_wide",))
        assert run.why.startswith("threadgroup: in a causal prefill of 83 rows its out differs by")
        return
    assert (run.state, run.why) == ("threadgroup", "passed the self-test")
    assert run.launches == once((LATENT_KERNEL,)) and run.all_launches[PROBE] == 1
    by_hand = machines.run(tmp_path, Run(latent, environment={"FATTN_TENSOR": "registers"}))
    assert (by_hand.state, by_hand.launches) == ("threadgroup", once((LATENT_KERNEL,)))


TRIED = """
half = torch.randn(1, 2, 64, 64, device="mps", dtype=torch.float16)
lse = torch.zeros(1, 2, 64, device="mps")
if OP == "prefill_backward":
    torch_fattn.prefill_backward(half, None, half, half, half, half, lse, out_remainder=half)
else:
    getattr(torch_fattn, OP)(half, half, half)
for each in torch_fattn.compiled_kernels():
    if each.kernel.endswith("_tensor"):
        for name, value in each.constants.items():
            found.setdefault(name, []).append(value)
"""
SCORES = {"mask", "mask_map", "causal", "window", "softcap", "alibi", "sinks"}


@pytest.mark.parametrize(
    ("call", "tried"),
    [
        (
            PREFILL,
            {*SCORES, "grouped", "split", "packed", "packed_keys", "block_size", "has_seq_lens", "tree"},
        ),
        (BACKWARD, {*SCORES, "packed", "packed_keys", "grad_lse"}),
    ],
)
def test_the_trials_have_every_option(machines: Machines, tmp_path: Path, call: str, tried: set[str]) -> None:
    op = "prefill_backward" if call == BACKWARD else call
    run = machines.run(tmp_path, Run(calls=[], python=f"OP = {op!r}\n{TRIED}"))
    both = {name for name, values in run.found.items() if len({*map(bool, values)}) == 2}
    assert both >= tried, tried - both
    # The others are the same for all such calls, are kinds of numbers, or are for grids in slices.
    same = {"mask_pairs", "vector_loads", "scales", "token_major_out"}
    same |= {"sinks_kind", "slopes_kind", "sliced"}
    of_other_calls = {"has_seq_lens", "block_size", "tree", "split", "grouped", "grad_lse"}
    of_other_calls |= {"query_norm", "key_norm", "values", "slots", "starts", "vector_tables"}
    of_other_calls |= {"gate", "weighted", "raw_gates", "qk_norm", "has_state", "writes_state", "has_initial"}
    of_other_calls |= {"biased", "counts", "conv_state_out", "saved_out", "out_remainder"}
    assert {*run.found} - both <= same | of_other_calls


@pytest.mark.parametrize("call", CALLS)
def test_a_verdict_is_of_one_kind_of_call(machines: Machines, tested: Path, call: str) -> None:
    """What fails in one kind leaves the other alone, and so does its file, even under the other's name."""
    size_of_other = f"{other(call)} float16 64"
    calls = [{"call": call}, {"call": other(call)}]
    file_of(call, tested).unlink()
    run = machines.run(tested, Run(calls=calls, faults=[{"kernel": TENSORS[call][-1], "fails": True}]))
    assert (run.state, run.states[size_of_other]) == ("off", "registers"), run.why
    assert run.launches == once(SIMDGROUPS[call]) | once(TENSORS[other(call)])
    file_of(other(call), tested).write_text(file_of(call, tested).read_text())
    faults = [{"kernel": TENSORS[other(call)][0], "fails": True}]
    again = machines.run(tested, Run(calls=calls, faults=faults))
    assert (again.state, again.why, again.states[size_of_other]) == ("off", run.why, "off")
    assert again.hits[0] > 0, "the other, whose file was not its own, was tested"


@pytest.mark.parametrize(
    "change",
    [
        lambda text: "",
        lambda text: text[:-1],
        lambda text: text.replace("state registers", "state threadgroup"),
        lambda text: text + text,
    ],
    ids=["empty", "cut", "edited", "twice"],
)
def test_a_damaged_file_is_none(machines: Machines, tested: Path, change: Callable[[str], str]) -> None:
    file = file_of(PREFILL, tested)
    whole = file.read_text()
    file.write_text(change(whole))
    run = machines.run(tested, Run())
    assert run.all_launches[PROBE] == 1 and run.state == "registers"
    assert file.read_text() == whole, "it is written again"


@pytest.mark.parametrize(
    "environment",
    [{"SOFTMETAL_MACOS_BUILD": "25C57"}, {"SOFTMETAL_GPU_CORES": "20"}],
    ids=["another build of macOS", "another GPU"],
)
def test_what_a_verdict_belongs_to(machines: Machines, tested: Path, environment: dict[str, str]) -> None:
    before = verdicts(tested)
    run = machines.run(tested, Run(environment=environment))
    assert run.all_launches[PROBE] == 1 and run.state == "registers"
    assert len(verdicts(tested)) == len(before) + 1
    assert PROBE not in machines.run(tested, Run()).all_launches, "the first one is as good as before"


def test_a_folder_that_cannot_be_written(machines: Machines, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    run = machines.run(tmp_path / "file" / "folder", Run())
    assert (run.state, run.launches) == ("registers", {TENSOR: 1})


# Calls and traces that do not run the self-test.
UNTESTED = """
import torch._subclasses.fake_tensor as fake
from torch.fx.experimental.proxy_tensor import make_fx
from torch_fattn.runtime import tensor_units

half = torch.randn(1, 2, 64, 64, device="mps", dtype=torch.float16)
torch_fattn.decode(half[:, :, :8], half, half)
torch_fattn.prefill(half.float(), half.float(), half.float())
torch_fattn.prefill(half[..., :40], half[..., :40], half[..., :40])
torch_fattn.prefill(half[:, :, :8], half, half)
torch_fattn.explain("prefill", half, half, half)
tokens, tables = half[0].transpose(0, 1)[:2], torch.tensor([[0], [0]], device="mps", dtype=torch.int32)
lengths, starts = (torch.tensor(n, device="mps", dtype=torch.int32) for n in ([60, 30], [0, 1, 2]))
pool = half.transpose(1, 2).contiguous()
torch_fattn.install()
with fake.FakeTensorMode() as mode:
    faked = torch.empty(1, 2, 64, 64, device="mps", dtype=torch.float16)
    torch_fattn.prefill(faked, faked, faked)
    torch.nn.functional.scaled_dot_product_attention(faked, faked, faked)
graph = make_fx(torch.nn.functional.scaled_dot_product_attention, tracing_mode="fake")(half, half, half)
found["graph"] = graph.code
torch_fattn.uninstall()
torch_fattn.paged_prefill(tokens.contiguous(), pool, pool, tables, lengths, starts, 1, is_causal=True)
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


DELAYED = """
half = torch.randn(1, 2, 64, 64, device="mps", dtype=torch.float16)
draft = torch.randn(1, 16, 3, 64, device="mps", dtype=torch.float16)

def decode():
    explained = torch_fattn.explain("decode", draft, half, half, softcap=5.0).data["tensor"]
    torch_fattn.reset_launch_counts()
    torch_fattn.decode(draft, half, half, softcap=5.0)
    return torch_fattn.launch_counts().get("fattn_prefill_tensor", 0), explained

found["decodes"] = [decode()]
NEXT
found["decodes"].append(decode())
"""


@pytest.mark.parametrize(
    "next_call",
    [
        "torch_fattn.prefill(half.float(), half.float(), half.float())",
        'torch_fattn.warmup("decode", draft, half, half)',
    ],
)
def test_a_decode_leaves_it_to_the_next_prefill(machines: Machines, tmp_path: Path, next_call: str) -> None:
    """Or to warmup. A model with latent attention has other heads in prefills than in decodes."""
    run = machines.run(tmp_path, Run(calls=[], python=DELAYED.replace("NEXT", next_call)))
    assert [name for name, state in run.states.items() if state == "registers"] == ["prefill float16 64"]
    assert run.found["decodes"] == [
        [0, "not tested yet on this GPU; the next prefill or warmup does it"],
        [1, "used; scores stay in registers: passed the self-test"],
    ]
    control = machines.run(tmp_path / "other", Run(calls=[{"dtype": "float32"}]))
    assert {*control.states.values()} == {"untested"}


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
found["used"] = [torch_fattn.launch_counts()[f"fattn_{kernel}_tensor"]
                 for kernel in ("prefill", "backward_query", "backward_key")]
"""


def test_what_surrounds_it(machines: Machines, tmp_path: Path) -> None:
    run = machines.run(tmp_path, Run(calls=[], python=SURROUNDED))
    assert run.all_launches[PROBE] == len(CALLS) and run.found["used"] == [2, 1, 1]
    assert run.found["first"] == run.found["seen"], "a mode sees the same calls with and without the test"
    assert run.found["gradient"] and run.found["generators"] == [True, True] and run.found["pending"]


# First calls, whose results are those of later ones.
CONTEXTS = {
    "inference": "with torch.inference_mode(): first = torch_fattn.prefill(half, half, half)",
    "no gradients": "with torch.no_grad(): first = torch_fattn.prefill(half, half, half)",
    "vmap": "first = torch.vmap(lambda q: torch_fattn.prefill(q, q, q))(half[None])[0]",
    "torch.compile": """
with torch_fattn.installed():
    attend = torch.compile(torch.nn.functional.scaled_dot_product_attention, backend="aot_eager")
    first = attend(half, half, half)
""",
    "threads": """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(4) as pool:
    first, *_ = list(pool.map(lambda _: torch_fattn.prefill(half, half, half), range(8)))
""",
}


@pytest.mark.parametrize("name", CONTEXTS)
def test_contexts(machines: Machines, tmp_path: Path, name: str) -> None:
    python = f"""
half = torch.randn(1, 2, 64, 64, device="mps", dtype=torch.float16)
{CONTEXTS[name]}
found["equal"] = torch.equal(first, torch_fattn.prefill(half, half, half))
"""
    run = machines.run(tmp_path, Run(calls=[], python=python))
    assert run.found["equal"] and run.state == "registers"
    assert run.all_launches[PROBE] == 1, "it runs once, of one variant"


def test_processes_write_one_file(machines: Machines, tmp_path: Path) -> None:
    others = Machines()
    try:
        with ThreadPoolExecutor(2) as pool:
            runs = list(pool.map(lambda each: each.run(tmp_path, Run()), (machines, others)))
    finally:
        others.stop()
    assert [run.state for run in runs] == ["registers"] * 2
    assert len(verdicts(tmp_path)) == 1 and not list(tmp_path.glob(".tensor-*"))
    assert PROBE not in machines.run(tmp_path, Run()).all_launches


@pytest.mark.parametrize("fails", [False, True])
def test_install_waits_for_the_verdict(machines: Machines, tmp_path: Path, fails: bool) -> None:
    """Where torch runs on matrix units, too: without them, its own prefill would be the faster one."""
    if torch.__version__ < "2.14":
        pytest.skip("torch has tensor kernels from 2.14 on")
    faults = [{"kernel": TENSOR, "fails": True}] if fails else []
    run = machines.run(tmp_path, Run(calls=[{"sdpa": True, "is_causal": False}], faults=faults))
    assert run.state == ("off" if fails else "registers")
    assert run.launches == ({} if fails else {TENSOR: 1})
