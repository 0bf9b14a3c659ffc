"""Random calls of the operators of linear attention against float64."""

from __future__ import annotations

import pytest
import torch

import torch_fattn
from tests.conftest import Checked, counted_launches
from tests.helpers import linear_problems
from tests.helpers.linear_problems import CONV, RULE, STEP, LinearProblem

ORDERS = ("forward", "reverse", "random")  # of the threads
KERNELS = {
    RULE: ("fattn_gated_delta_prepare", "fattn_gated_delta_scan"),
    STEP: ("fattn_gated_delta_step",),
    CONV: ("fattn_causal_conv1d",),
}
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
