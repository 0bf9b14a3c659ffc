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
from tests.helpers.tensor_kernels import BACKWARD_KERNELS, HEADS, STATES
from torch_fattn import reference

pytestmark = needs_emulator

LAYOUTS = 12
ORDERS = ("forward", "reverse", "random:3")
SIMDGROUP_KERNELS = ("fattn_backward_query", "fattn_backward_key")


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
        assert BACKWARD_KERNELS[0] in kernels and not {*SIMDGROUP_KERNELS} & {*kernels}
        assert BACKWARD_KERNELS[1] in kernels or not arguments["key"].numel()
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
    problem = tensor_kernels.backward_problem(seed, HEADS[number % 3])  # latent heads have no gradients
    try:
        run_and_check(problem, layout, seed)
    except Exception as error:
        error.add_note(f"seed {seed}, layout {layout}: {problem}")
        raise


@pytest.mark.parametrize(("layout", "expected"), [("m5", 2), ("random:2", 2), ("random:0", 1)])
def test_states_that_a_layout_allows(layout: str, expected: int) -> None:
    forward = Problem(0, "prefill", torch.float16, 1, 2, 1, 40, 70, 64, 64)
    problem = BackwardProblem(0, forward, out="remainder")
    assert run_and_check(problem, layout, 0) == expected


def products_of(state: str, dim: int, length: int, is_causal: bool = False) -> dict[str, int]:
    """The products of each kernel in 8x8x8, all of them on tensor operations."""
    rows = torch.randn(1, 1, length, dim, dtype=torch.float16)
    lse = torch.full((1, 1, length), float(length)).log()
    arguments = {"grad_out": rows, "query": rows, "key": rows, "value": rows, "lse": lse, "grad_lse": None}
    arguments |= {"out": rows, "out_remainder": rows, "is_causal": is_causal}
    plan = tensor_kernels.plan_of("prefill_backward", arguments, state)
    buffers = direct_launch.backward_buffers("prefill_backward", arguments, plan)
    products = {}
    for step in plan["passes"]:
        counters = direct_launch.launch(step, buffers, tensor_layout="m5")
        assert counters["products"] == 0, "of simdgroup matrices"
        products[step["kernel"]] = counters["tensor_products"]
    return products


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("dim", [64, 128])
def test_products(dim: int, state: str) -> None:
    """Three products for the query; three for the key and two for the value. Causal, those of the steps of 32
    in which some row sees a key."""
    length = 128
    whole = (length // 8) ** 2 * (dim // 8)
    query, key = BACKWARD_KERNELS
    assert products_of(state, dim, length) == {query: 3 * whole, key: 5 * whole}
    of_rows = sum(-(-(first + 16) // 32) for first in range(0, length, 16))
    of_keys = sum((length - first // 32 * 32) // 32 for first in range(0, length, 16))
    step = (16 // 8) * (32 // 8) * (dim // 8)
    expected = {query: 3 * of_rows * step, key: 5 * of_keys * step}
    assert products_of(state, dim, length, is_causal=True) == expected
    assert expected[query] < 3 * whole and expected[key] < 5 * whole


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("dim", [64, 128, 192])
def test_keys_of_a_half_hidden_cell(dim: int, state: str) -> None:
    """Wide heads have tiles of 16 keys, half a cell of the map, which hides the first 16 here."""
    query, key, value, grad_out = torch.randn(
        4, 1, 1, 32, dim, generator=torch.Generator().manual_seed(0)
    ).half()
    mask = torch.arange(32).expand(32, 32) >= 16
    out, lse = reference.prefill(query, key, value, mask)
    lse = lse.float()
    exact = reference.prefill_backward(grad_out, None, query, key, value, None, lse, mask)
    mask = mask[None, None]
    saved = out.half()
    arguments: dict[str, Any] = {"grad_lse": None, "out": saved}
    arguments["out_remainder"] = backward_problems.remainder_of(out, saved)
    arguments |= {"grad_out": grad_out, "query": query, "key": key, "value": value, "lse": lse}
    arguments |= {"attn_mask": mask, "mask_map": reference.mask_map(mask).to(torch.uint8)}
    plan = tensor_kernels.plan_of("prefill_backward", arguments, state)
    found = direct_launch.gradients(arguments, plan, tensor_layout="m5")
    for name, one, true in zip(direct_launch.GRADIENTS, found, exact[:3], strict=False):
        assert (one.double() - true).abs().max() <= 2e-3 * true.abs().max(), name
