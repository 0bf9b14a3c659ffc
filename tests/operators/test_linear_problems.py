"""Random calls of the operators of linear attention against float64, the cost of registers, and what else
holds of causal_conv1d."""

from __future__ import annotations

import itertools

import pytest
import torch

import torch_fattn
from tests.conftest import Checked, counted_launches, needs_emulator
from tests.helpers import linear_problems
from tests.helpers.linear_problems import CONV, RULE, STEP, LinearProblem
from tests.helpers.problems import DTYPES
from tests.helpers.tensors import same_bits

ORDERS = ("forward", "reverse", "random")  # of the threads
KERNELS = {
    RULE: ("fattn_gated_delta_prepare", "fattn_gated_delta_scan"),
    STEP: ("fattn_gated_delta_step",),
    CONV: ("fattn_causal_conv1d",),
}
PLAIN = {"layout": "contiguous", "float_gates": False, "length": 8, "use_qk_l2norm_in_kernel": True}
PROBLEMS = [problem for op in KERNELS for problem in linear_problems.draw(op, 60)]


def run_and_check(problem: LinearProblem, device: str, checked: Checked) -> None:
    case = linear_problems.build(problem)
    arguments, bases = case.arguments(device)
    case.expected["out"][1].to(problem.dtype).to(device).fill_(torch.nan)  # the memory of the result
    with checked(order=ORDERS[problem.index % 3]), counted_launches() as launches:
        out = getattr(torch_fattn, problem.op)(**arguments).cpu()
    if device == "cpu" or problem.tokens[1]:
        assert launches == (dict.fromkeys(KERNELS[problem.op], 1) if device == "mps" else {})
    case.check(out, bases)


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: f"{problem.op}-{problem}")
def test_problem(problem: LinearProblem, device: str, checked: Checked) -> None:
    run_and_check(problem, device, checked)


@pytest.mark.parametrize("op", KERNELS)
def test_sweep(op: str, sweep_seed: int, device: str, checked: Checked, pytestconfig: pytest.Config) -> None:
    failed = []
    for problem in linear_problems.draw(op, pytestconfig.getoption("--problems"), sweep_seed):
        try:
            run_and_check(problem, device, checked)
        except (AssertionError, RuntimeError) as error:
            failed.append(f"seed {sweep_seed}, {problem}: {error}")
    assert not failed, "\n".join(failed)


@pytest.mark.host_only
@pytest.mark.parametrize("op", [RULE, STEP])
def test_no_registers_spill(op: str) -> None:
    """On M1 and M2, by Mesa's compiler, up to 128 columns; a core holds 512 threads of a step. Of 256 columns
    the kernels that have a state spill, but for a step with a decay per channel."""
    compiler = pytest.importorskip("softmetal.testing.agx")
    if not compiler.is_built():
        pytest.skip("needs the AGX compiler")
    from bench.backends import agx
    from bench.peers import fattn

    for channel_decay, dim in itertools.product((False, True), (64, 128, 256)):
        shape = {"dims": (dim, dim), "channel_decay": channel_decay, "group": 1 if channel_decay else 2}
        call = linear_problems.call_of(op, "meta", dtype=torch.float16, **PLAIN, **shape)
        for step in torch_fattn.explain(op, **call, family=7, cores=8).passes:
            cost = compiler.compile_kernel(agx._kernel(fattn.pass_of(step, "float16"), fast_math=False))
            may_spill = dim == 256 and (
                step["kernel"] == KERNELS[RULE][1] or op == STEP and not channel_decay
            )
            assert (cost.spills + cost.fills > 0) == may_spill, (step["kernel"], shape)
            assert op == RULE or cost.resident_threads == 512


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_splits_and_batches_of_a_convolution(dtype: torch.dtype, device: str) -> None:
    """A cut anywhere changes no bit, nor do other sequences."""
    x, weight, bias = torch.randn(3, 40, 33), torch.randn(33, 4), torch.randn(33)
    x, weight, bias = (each.to(device, dtype) for each in (x, weight, bias))
    before = torch.randn(3, 33, 5).to(device, dtype)
    state = before.clone()
    out = torch_fattn.causal_conv1d(x, weight, bias, state, activation="silu")
    for cut in (1, 16, 21, 39):
        carried = before.clone()
        parts = [
            torch_fattn.causal_conv1d(part, weight, bias, carried, activation="silu")
            for part in (x[:, :cut], x[:, cut:])
        ]
        assert same_bits([torch.cat(parts, 1), carried], [out, state])
    alone = torch_fattn.causal_conv1d(x[1:2], weight, bias, before[1:2].clone(), activation="silu")
    assert same_bits(alone, out[1:2])


@needs_emulator
def test_a_token_of_a_convolution_is_read_once() -> None:
    """But for the window before every sixteenth token, and the columns of the state."""
    import softmetal

    x, weight = torch.randn(1, 64, 32).to("mps"), torch.randn(32, 4).to("mps")
    with softmetal.checks(count_bytes=True), softmetal.record() as launches:
        torch_fattn.causal_conv1d(x, weight)
    [launch] = launches
    assert launch["buffers_read"]["0"] == 4 * 32 * (64 + 3 * 3)
    assert launch["buffers_written"]["3"] == 4 * 32 * 64
