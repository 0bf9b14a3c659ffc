"""causal_conv1d: float64, transformers' functions, splits and batches, and its cost."""

from __future__ import annotations

import pytest
import torch

import torch_fattn
from tests.conftest import Checked, counted_launches, needs_emulator
from tests.helpers import delta_problems
from tests.helpers.delta_problems import DeltaProblem
from tests.helpers.problems import DTYPES
from tests.helpers.tensors import same_bits

ORDERS = ("forward", "reverse", "random")  # of the threads


def run_and_check(problem: DeltaProblem, device: str, checked: Checked) -> None:
    with checked(order=ORDERS[problem.index % 3]), counted_launches() as launches:
        delta_problems.run_and_check(problem, device)
    if device == "mps" and sum(problem.tokens[1:]):
        assert launches == {"fattn_causal_conv1d": 2}


@pytest.mark.parametrize("problem", delta_problems.draw("causal_conv1d", 60), ids=str)
def test_problem(problem: DeltaProblem, device: str, checked: Checked) -> None:
    run_and_check(problem, device, checked)


def test_sweep(sweep_seed: int, device: str, checked: Checked, pytestconfig: pytest.Config) -> None:
    for problem in delta_problems.draw("causal_conv1d", pytestconfig.getoption("--problems"), sweep_seed):
        run_and_check(problem, device, checked)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_splits_and_batches(dtype: torch.dtype, device: str) -> None:
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
def test_a_token_is_read_once() -> None:
    """But for the window before every sixteenth token, and the columns of the state."""
    import softmetal

    x, weight = torch.randn(1, 64, 32).to("mps"), torch.randn(32, 4).to("mps")
    with softmetal.checks(count_bytes=True), softmetal.record() as launches:
        torch_fattn.causal_conv1d(x, weight)
    [launch] = launches
    assert launch["buffers_read"]["0"] == 4 * 32 * (64 + 3 * 3)
    assert launch["buffers_written"]["3"] == 4 * 32 * 64
