"""Prefills and decodes on tensor operations, launched on the emulator's runtime: random problems under many
layouts of cooperative tensors, scores in registers and through threadgroup memory."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.conftest import needs_emulator
from tests.helpers import direct_launch, problems, tensor_kernels
from tests.helpers.accuracy import assert_close
from tests.helpers.problems import Problem
from tests.helpers.tensor_kernels import KERNELS, LATENT_KERNEL, STATES

pytestmark = needs_emulator

LAYOUTS = 12
ORDERS = ("forward", "reverse", "random:3")


def states_of(prefill: dict[str, object], layout: str, fits: bool | None) -> tuple[str, ...]:
    """What the self-test would allow."""
    if prefill["kernel"] == LATENT_KERNEL:
        return STATES[1:]
    if fits is None:
        fits = tensor_kernels.probe(prefill, layout).allows_registers
    return STATES if fits else STATES[1:]


def run_and_check(problem: Problem, layout: str, seed: int, fits: bool | None = None) -> int:
    """Runs it in every allowed state; returns how many those are. `fits`: whether the layout allows
    registers, if that is known."""
    case = problems.build(problem, seed)
    arguments, _ = case.arguments("cpu")
    order = ORDERS[problem.index % len(ORDERS)]
    plan = tensor_kernels.plan_of(problem.op, arguments, "registers")
    states = states_of(next(step for step in plan["passes"] if step["kernel"] in KERNELS), layout, fits)
    for state in states:
        plan = tensor_kernels.plan_of(problem.op, arguments, state)
        assert {*KERNELS} & {step["kernel"] for step in plan["passes"]}, plan["tensor"]
        out, lse = direct_launch.run(case, plan=plan, order=order, tensor_layout=layout)
        assert_close(case, out, lse)
    return len(states)


@pytest.mark.parametrize("number", range(LAYOUTS))
def test_random_problems(number: int) -> None:
    """Under a layout, with new problems and a new seed of the layout in every run."""
    seed = random.SystemRandom().randrange(2**32)
    layout = tensor_kernels.layouts(seed)[number]
    for problem in tensor_kernels.problems(seed):
        try:
            run_and_check(problem, layout, seed)
        except Exception as error:
            error.add_note(f"seed {seed}, layout {layout}: {problem}")
            raise


@pytest.mark.parametrize(
    ("layout", "expected"), [("m5", 2), ("random:2", 2), ("random:1", 1), ("random:0", 1)]
)
def test_states_that_a_layout_allows(layout: str, expected: int) -> None:
    problem = Problem(0, "prefill", torch.float16, 1, 2, 1, 40, 70, 64, 64)
    assert run_and_check(problem, layout, 0) == expected


# fmt: off
EDGES = (
    Problem(0, "prefill", torch.float16, 1, 2, 1, 16, 1, 64, 64),
    Problem(1, "prefill", torch.bfloat16, 1, 2, 1, 65, 31, 128, 128, causality="bottom_right"),
    Problem(2, "prefill", torch.float16, 2, 2, 2, 64, 32, 96, 96, causality="top_left", q_offset=0),
    Problem(3, "prefill", torch.float16, 1, 2, 1, 17, 33, 256, 256, causality="offset", q_offset=-9),
    Problem(4, "prefill", torch.float16, 1, 2, 1, 70, 140, 192, 192, window_left=9, window_right=11,
        sink_tokens=3),
    Problem(5, "paged_prefill", torch.float16, 2, 4, 2, 33, 96, 64, 64, q_lens=(1, 33), seq_lens=(96, 50),
        block_size=32, causality="bottom_right"),
    Problem(6, "paged_prefill", torch.bfloat16, 2, 4, 2, 33, 96, 80, 80, q_lens=(33, 0), seq_lens=(70, 50),
        block_size=24),
    Problem(7, "decode", torch.float16, 3, 16, 2, 3, 40, 64, 64, seq_lens=(40, 1, 0)),
    Problem(8, "decode", torch.bfloat16, 2, 2, 1, 16, 70, 128, 128, seq_lens=(7, 33), tree="each"),
    Problem(9, "paged_decode", torch.float16, 2, 8, 2, 9, 64, 256, 256, seq_lens=(64, 31), block_size=32,
        tree="shared", window_left=12, sink_tokens=2),
    Problem(10, "paged_decode", torch.float16, 3, 14, 2, 16, 96, 72, 72, seq_lens=(96, 15, 40), block_size=8,
        mask=torch.bool, sinks=True),
    Problem(16, "decode", torch.bfloat16, 2, 16, 1, 2, 70, 576, 512, seq_lens=(69, 1), tree="each",
        value_in_key=True),
    Problem(17, "paged_decode", torch.float16, 2, 16, 1, 3, 96, 576, 512, seq_lens=(96, 15), block_size=24,
        tree="shared", mask=torch.bool, window_left=50),
    Problem(11, "prefill", torch.float16, 1, 16, 1, 1, 1, 576, 512),
    Problem(12, "prefill", torch.bfloat16, 1, 16, 1, 5, 49, 576, 512, causality="bottom_right"),
    Problem(13, "prefill", torch.float16, 1, 2, 1, 33, 117, 576, 512, window_left=9, window_right=11,
        sink_tokens=3),
    Problem(14, "paged_prefill", torch.float16, 2, 16, 1, 3, 96, 576, 512, q_lens=(1, 3), seq_lens=(96, 50),
        block_size=16, causality="bottom_right"),
    Problem(15, "paged_prefill", torch.bfloat16, 2, 16, 1, 3, 96, 576, 512, q_lens=(3, 0), seq_lens=(70, 50),
        block_size=24),
)
# fmt: on


@pytest.mark.parametrize("problem", EDGES, ids=str)
def test_edges(problem: Problem) -> None:
    """One key, fewer keys than a step, tiles and steps that end where rows and keys do."""
    run_and_check(problem, "m5", 1, fits=True)
    run_and_check(problem, "random:4", 1, fits=False)


@pytest.mark.parametrize("sizes", [(150, 300, 64, 64), (40, 200, 576, 512)])
def test_parts_and_slices(sizes: tuple[int, int, int, int]) -> None:
    """Keys cut into parts, and a grid cut into dispatches."""
    rows, keys, head_dim, value_dim = sizes
    problem = Problem(
        *(0, "prefill", torch.float16, 1, 2, 1, rows, keys, head_dim, value_dim),
        causality="bottom_right",
        sinks=True,
    )
    case = problems.build(problem, 2)
    arguments, _ = case.arguments("cpu")
    for state in STATES:
        parts = tensor_kernels.plan_of("prefill", arguments, state)
        direct_launch.cut_prefill(parts, 3, 2)
        slices = tensor_kernels.plan_of("prefill", arguments, state)
        direct_launch.cut_into_slices(slices["passes"][0], 2)
        for plan in (parts, slices):
            assert_close(case, *direct_launch.run(case, plan=plan))


# A sequence of one part, one of several, and one without keys.
OF_PARTS = Problem(0, "decode", torch.float16, 3, 16, 2, 8, 900, 64, 64, seq_lens=(300, 900, 0), sinks=True)


def decode_with_room(
    keys: int, state: str = "registers", change: Callable[[dict[str, Any]], None] = lambda plan: None
) -> tuple[torch.Tensor, ...]:
    """Results of the first sequences that fit, with a cache for so many keys; and how many parts it has."""
    fit = [i for i, length in enumerate(OF_PARTS.seq_lens or ()) if length <= keys]
    arguments, _ = problems.build(OF_PARTS, 3).arguments("cpu")
    for name in ("query", "key", "value", "seq_lens"):
        arguments[name] = arguments[name][fit]
    for name in ("key", "value"):
        room = torch.full((len(fit), 2, max(keys - OF_PARTS.kv_len, 0), 64), torch.nan, dtype=torch.float16)
        arguments[name] = torch.cat((arguments[name][:, :, :keys], room), dim=2)
    plan = tensor_kernels.plan_of("decode", arguments, state)
    change(plan)
    buffers = direct_launch.buffers_of("decode", arguments, plan)
    for step in plan["passes"]:
        direct_launch.launch(step, buffers, tensor_layout="random:2")
    return (
        buffers["out"][[0, -1]],
        buffers["lse"][[0, -1]],
        torch.tensor(plan["passes"][0]["params"]["parts"]),
    )


def by_the_capacity(plan: dict[str, Any]) -> None:
    """Parts of equal size for the whole cache, as those of a prefill."""
    step = plan["passes"][0]
    direct_launch.set_params(step, {"max_parts": 1 << 20, "min_part": step["params"]["parts"] // 2 + 1})


@pytest.mark.parametrize("state", STATES)
def test_results_do_not_depend_on_the_capacity(state: str) -> None:
    """A decode in one pass, and in as many parts as two caches may have."""
    results = [decode_with_room(keys, state) for keys in (300, 1000, 20000)]
    parts = [int(parts) for _, _, parts in results]
    assert parts == [1, 2, 16], "at most as many as eight cores take"
    for out, lse, _ in results[1:]:
        assert torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1])
    few, many = (decode_with_room(keys, state, by_the_capacity)[0] for keys in (1000, 20000))
    assert not torch.equal(few, many), "the control"


def test_the_largest_part() -> None:
    """Cuts a sequence into more parts than fill the GPU; without the limit its results have other bits."""
    case = problems.build(replace(OF_PARTS, batch=1, seq_lens=(400,), kv_len=400), 3)
    arguments, _ = case.arguments("cpu")
    results = []
    for largest in (1 << 20, 3):
        plan = tensor_kernels.plan_of("decode", arguments, "registers")
        direct_launch.cut_prefill(plan, 5, 1)
        direct_launch.set_params(plan["passes"][0], {"max_parts": 2, "largest_part": largest})
        results.append(direct_launch.run(case, plan=plan))
        assert_close(case, *results[-1])
    assert not torch.equal(results[0][0], results[1][0])
