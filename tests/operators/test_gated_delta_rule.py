"""gated_delta_rule: the float64 recurrence, transformers' functions, splits, batches, and what a call costs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import torch_fattn
from tests.conftest import Checked, counted_launches, needs_emulator
from tests.helpers import delta_problems
from tests.helpers.delta_problems import DeltaProblem
from tests.helpers.tensors import same_bits

ORDERS = ("forward", "reverse", "random")  # of the threads
LAUNCHES = ("fattn_gated_delta_prepare", "fattn_gated_delta_scan")


def run_and_check(problem: DeltaProblem, device: str, checked: Checked) -> None:
    with checked(order=ORDERS[problem.index % 3]), counted_launches() as launches:
        delta_problems.run_and_check(problem, device)
    if device == "mps" and sum(problem.tokens) and sum(problem.lengths):
        assert launches == dict.fromkeys(LAUNCHES, 2)


@pytest.mark.parametrize("problem", delta_problems.draw("gated_delta_rule", 60), ids=str)
def test_problem(problem: DeltaProblem, device: str, checked: Checked) -> None:
    run_and_check(problem, device, checked)
