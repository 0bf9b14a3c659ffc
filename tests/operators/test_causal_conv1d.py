"""causal_conv1d: float64, transformers' functions, splits and batches."""

from __future__ import annotations

import pytest
import torch

import torch_fattn
from tests.conftest import Checked, counted_launches
from tests.helpers import delta_problems
from tests.helpers.delta_problems import DeltaProblem
from tests.helpers.tensors import same_bits

ORDERS = ("forward", "reverse", "random")  # of the threads


@pytest.mark.parametrize("problem", delta_problems.draw("causal_conv1d", 60), ids=str)
def test_problem(problem: DeltaProblem, device: str, checked: Checked) -> None:
    with checked(order=ORDERS[problem.index % 3]), counted_launches() as launches:
        delta_problems.run_and_check(problem, device)
    if device == "mps" and sum(problem.tokens):
        assert launches == {"fattn_causal_conv1d": 2}
