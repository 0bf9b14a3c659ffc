"""300 random problems of the backwards on "mps" and on "cpu": right by the accuracy rule of gradients, NaN
all around, the checks for races, bounds and uninitialised reads silent, inputs untouched, kernels launched.

The sweep runs 500 more for each seed: `pytest -m slow tests/operators/test_backward_random.py --seeds 1-40`.
"""

from __future__ import annotations

import pytest
import torch

from tests.conftest import Checked, counted_launches
from tests.helpers import backward_problems, problems, small_problems
from tests.helpers.backward_problems import SHARP, BackwardProblem
from tests.helpers.gradient_accuracy import assert_gradients_close
from tests.helpers.tensors import same_bits

PROBLEMS = backward_problems.draw(300)
ORDERS = ("forward", "reverse", "random")  # of the threads


def run_and_check(problem: BackwardProblem, seed: int, checked: Checked, device: str) -> None:
    case = backward_problems.build(problem, seed)
    arguments, bases = case.arguments(device)
    op = getattr(torch.ops.fattn, problem.op)
    order = ORDERS[problem.index % len(ORDERS)]
    with checked(order=order, seed=problem.index), counted_launches() as launches:
        gradients = op(**arguments)
    assert bool(launches) == (device == "mps")
    assert_gradients_close(case, tuple(each.cpu() for each in gradients))
    for name, base in bases.items():
        assert same_bits(base.cpu(), case.all_operands[name].base), f"{name} was written"
    if problem.index % 10 == 0:
        with checked(order="reverse"):
            again = op(**arguments)
        assert all(map(same_bits, gradients, again)), "the same bits from run to run"


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_problem(problem: BackwardProblem, device: str, checked: Checked) -> None:
    run_and_check(problem, 0, checked, device)


@pytest.mark.parametrize("dim", [16, 24, 32, 48, 160, 176, 208, 224])
@pytest.mark.parametrize("op", backward_problems.OPS)
def test_other_head_sizes(op: str, dim: int, device: str, checked: Checked) -> None:
    """Heads of sizes that are not drawn, each in one dtype."""
    dtype, causality = problems.DTYPES[dim // 8 % 3], ("none", "bottom_right")[dim // 16 % 2]
    sizes = {"q_len": 33, "kv_len": 64, "seq_lens": (20, 64), "head_dim": dim, "causality": causality}
    forward = small_problems.problem(op, dtype, **sizes, softcap=30.0, alibi_slopes=True)
    run_and_check(BackwardProblem(dim, forward, grad_lse=True), 0, checked, device)


def test_sweep(sweep_seed: int, device: str, checked: Checked, pytestconfig: pytest.Config) -> None:
    failed = []
    for problem in backward_problems.draw(pytestconfig.getoption("--problems"), sweep_seed):
        try:
            run_and_check(problem, sweep_seed, checked, device)
        except (AssertionError, RuntimeError) as error:
            failed.append(f"seed {sweep_seed}, {problem}: {error}")
    assert not failed, "\n".join(failed)


@pytest.mark.host_only
@pytest.mark.parametrize("problem", backward_problems.draw(40, seed=2), ids=str)
def test_all_sequences_at_once(problem: BackwardProblem) -> None:
    """On CPU tensors, with the kernel registered for CUDA."""
    case = backward_problems.build(problem, seed=2)
    arguments, _bases = case.arguments("cpu")
    cuda = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    assert_gradients_close(case, getattr(torch.ops.fattn, problem.op).default.redispatch(cuda, **arguments))


@pytest.mark.host_only
def test_the_problems_cover_every_option() -> None:
    for op in backward_problems.OPS:
        of_op = [p for p in PROBLEMS if p.forward.op == op]
        assert {p.forward.dtype for p in of_op} == set(problems.DTYPES)
        assert {p.forward.causality for p in of_op} == set(problems.CAUSALITIES)
        assert {p.out for p in of_op} == set(backward_problems.OUTS)
        assert {p.grad_lse for p in of_op} == {False, True}
        assert {p.grad_layout for p in of_op} == set(problems.LAYOUTS)
        assert {p.forward.sharpness for p in of_op} == {1.0, SHARP}
        for name, option in problems.OPTIONS.items():
            if op in option.ops:
                assert {getattr(p.forward, name) for p in of_op} == {*option.values}, name
    assert any(0 in p.forward.q_lens for p in PROBLEMS if p.forward.q_lens)
    assert any(0 in p.forward.seq_lens for p in PROBLEMS if p.forward.seq_lens)
