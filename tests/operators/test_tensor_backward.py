"""Gradients on tensor operations, launched on the emulator's runtime: random problems under many layouts of
cooperative tensors, in registers and through threadgroup memory."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from tests.conftest import needs_emulator
from tests.helpers import backward_problems, direct_launch, tensor_kernels
from tests.helpers.backward_problems import BackwardProblem
from tests.helpers.gradient_accuracy import assert_gradients_close
from tests.helpers.problems import Problem
from tests.helpers.tensor_kernels import BACKWARD_KERNELS, STATES

pytestmark = needs_emulator

LAYOUTS = 12
ORDERS = ("forward", "reverse", "random:3")


def run_and_check(problem: BackwardProblem, layout: str, seed: int, slices: int = 0) -> int:
    """Runs it in every state that the self-test would allow; returns how many those are. `slices`: the
    threadgroups of a dispatch."""
    case = backward_problems.build(problem, seed)
    order = ORDERS[problem.index % len(ORDERS)]
    arguments = backward_problems.as_launched(case.arguments("cpu")[0])
    plan = tensor_kernels.plan_of(problem.op, arguments, "registers")
    query_pass = next(step for step in plan["passes"] if step["kernel"] == BACKWARD_KERNELS[0])
    states = STATES if tensor_kernels.probe(query_pass, layout).allows_registers else STATES[1:]
    for state in states:
        plan = tensor_kernels.plan_of(problem.op, arguments, state)
        kernels = [step["kernel"] for step in plan["passes"]]
        assert {*BACKWARD_KERNELS} <= {*kernels, *([] if problem.forward.kv_len else BACKWARD_KERNELS)}
        buffers: dict[str, Any] = direct_launch.backward_buffers(problem.op, arguments, plan)
        for step in plan["passes"]:
            if slices:
                direct_launch.cut_into_slices(step, slices)
            direct_launch.launch(step, buffers, order=order, tensor_layout=layout)
        assert_gradients_close(case, tuple(buffers[name] for name in direct_launch.GRADIENTS))
    return len(states)


@pytest.mark.parametrize("number", range(LAYOUTS))
def test_random_problems(number: int) -> None:
    """Under a layout, with a new problem and a new seed of the layout in every run."""
    seed = random.SystemRandom().randrange(2**32)
    layout = tensor_kernels.layouts(seed)[number]
    for problem in tensor_kernels.backward_problems(1, seed):
        try:
            run_and_check(problem, layout, seed)
        except Exception as error:
            error.add_note(f"seed {seed}, layout {layout}: {problem}")
            raise


@pytest.mark.parametrize(("layout", "expected"), [("m5", 2), ("random:2", 2), ("random:0", 1)])
def test_states_that_a_layout_allows(layout: str, expected: int) -> None:
    problem = BackwardProblem(0, Problem(0, "prefill", torch.float16, 1, 2, 1, 40, 70, 64, 64))
    assert run_and_check(problem, layout, 0) == expected
