"""The backwards at the edges of their contract: dominant keys, rows and keys that nothing sees, NaN."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import torch_fattn
from tests.helpers import backward_problems, problems
from tests.helpers.backward_problems import NAMES, SHARP, BackwardCase, BackwardProblem
from tests.helpers.gradient_accuracy import assert_gradients_close, errors_of, limits_of
from torch_fattn.operators.backward import Gradients

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SIXTEEN_BITS = DTYPES[1:]


def run(case: BackwardCase, device: str, **changed: Any) -> Gradients:
    arguments, _bases = case.arguments(device)
    return on_cpu(getattr(torch_fattn, case.problem.op)(**{**arguments, **changed}))


def on_cpu(gradients: Gradients) -> Gradients:
    query, key, value, *parameters = gradients
    sinks, slopes = (None if each is None else each.cpu() for each in parameters)
    return query.cpu(), key.cpu(), value.cpu(), sinks, slopes


# ---- rows with one dominant key, where dP - delta is small beside dP


def dominated(dtype: torch.dtype, out: str) -> BackwardCase:
    """Each row gives 0.1 % of its weight to other keys than its own."""
    forward = problems.Problem(0, "prefill", dtype, 1, 4, 2, 48, 48, 64, 64)
    case = problems.build(forward)
    mask = torch.full((1, 4, 48, 48), -11.0).masked_fill(torch.eye(48, dtype=torch.bool), 0.0)
    case.clean["attn_mask"], case.operands["attn_mask"] = mask, problems.lay_out(mask, "contiguous")
    return backward_problems.build(BackwardProblem(0, forward, out=out), forward=case)


@pytest.mark.parametrize("dtype", SIXTEEN_BITS, ids=str)
@pytest.mark.parametrize("out", backward_problems.OUTS)
def test_rows_with_one_dominant_key(dtype: torch.dtype, out: str, device: str) -> None:
    case = dominated(dtype, out)
    assert_gradients_close(case, run(case, device))


@pytest.mark.parametrize("dtype", SIXTEEN_BITS, ids=str)
def test_a_rounded_result_would_be_noticed_there(dtype: torch.dtype, device: str) -> None:
    """The control: the result in float32, but with the rounding errors of 16 bits."""
    case = dominated(dtype, "float32")
    arguments, _bases = case.arguments(device)
    limits = limits_of(case)
    errors = errors_of(case, run(case, device, out=arguments["out"].to(dtype).float()))
    for name in ("query", "key"):
        print(f"{name}: {errors[name] / limits[name]:.1f} times the limit")
        assert errors[name] > 2 * limits[name], name


# ---- large scores in float32, whose products the passes over rows and over keys add up in different orders


def sharp(rows: int, seed: int) -> BackwardCase:
    """The first row sees one key."""
    sizes = (1, 1, 1, rows, rows, 112, 112)
    forward = problems.Problem(5, "prefill", torch.float32, *sizes, causality="top_left", sharpness=SHARP)
    return backward_problems.build(BackwardProblem(5, forward), seed)


@pytest.mark.parametrize("rows", [1, 4])
def test_sharp_rows(rows: int, device: str) -> None:
    for seed in range(20):
        case = sharp(rows, seed)
        assert_gradients_close(case, run(case, device))


@pytest.mark.parametrize("dtype", SIXTEEN_BITS, ids=str)
def test_a_rounded_query_would_be_noticed_there(dtype: torch.dtype, device: str) -> None:
    """The control: scores with the rounding errors of 16 bits."""
    for seed in range(20):
        case = sharp(12, seed)
        query = case.arguments(device)[0]["query"].to(dtype).float()
        error, limit = errors_of(case, run(case, device, query=query))["value"], limits_of(case)["value"]
        assert error > 4 * limit, f"seed {seed}: {error / limit:.1f} times the limit"


# ---- what nothing sees


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sinks", [False, True])
def test_rows_without_keys_have_no_gradient(dtype: torch.dtype, sinks: bool, device: str) -> None:
    """Whatever their query and the gradient of their result hold."""
    forward = problems.Problem(
        1, "prefill", dtype, 1, 4, 2, 30, 11, 32, 32, causality="bottom_right", sinks=sinks
    )
    case = backward_problems.build(BackwardProblem(1, forward))
    arguments, _bases = case.arguments(device)
    expected = run(case, device)
    assert_gradients_close(case, expected)
    query, grad_out = arguments["query"].clone(), arguments["grad_out"].clone()
    query[:, :, :19] = grad_out[:, :, :19] = torch.nan
    found = run(case, device, query=query, grad_out=grad_out)
    for name, before, after in zip(NAMES, expected, found, strict=True):
        assert before is None or torch.equal(before, after), name
    assert torch.all(found[0][:, :, :19] == 0)


@pytest.mark.parametrize("operand", ["key", "value"])
def test_nan_in_a_key_that_is_seen_stays_in_its_sequence_and_head(operand: str, device: str) -> None:
    forward = problems.Problem(3, "prefill", torch.float32, 2, 4, 2, 20, 20, 32, 32, causality="top_left")
    case = backward_problems.build(BackwardProblem(3, forward))
    arguments, _bases = case.arguments(device)
    poisoned = arguments[operand].clone()
    poisoned[0, 1, 4] = torch.nan

    def gradients(**changed: Tensor) -> Gradients:
        operands = {name: arguments[name] for name in NAMES[:3]} | changed
        _out, lse = torch_fattn.prefill(**operands, is_causal=True, q_offset=0, return_lse=True)
        return run(case, device, **operands, lse=lse)

    expected, found = gradients(), gradients(**{operand: poisoned})
    assert found[0][0, 2:, 4:].isnan().all(), "the rows that see it"
    assert found[1][0, 1, 4].isnan().all(), "the key itself"
    heads = torch.ones(2, 4, dtype=torch.bool)
    heads[0, 2:] = False
    assert torch.equal(found[0][heads], expected[0][heads])
    for name, before, after in zip(("key", "value"), expected[1:3], found[1:3], strict=True):
        assert torch.equal(before[1], after[1]) and torch.equal(before[0, 0], after[0, 0]), name
