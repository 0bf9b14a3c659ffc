"""Prefill whose keys are cut into parts (csrc/kernels/common/steps.h: take_part), and tiles of several heads:
right with every option, bits that depend on the sequence alone, one launch of the parts and one of the
merge."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_fattn
from tests.conftest import counted_launches, needs_emulator
from tests.golden.calls import plan_of
from tests.helpers import direct_launch, problems
from tests.helpers.accuracy import assert_close
from tests.helpers.problems import Problem
from tests.helpers.tensors import same_bits

f16 = torch.float16
Results = tuple[Tensor, ...]

# Few rows over many keys, whose keys the planner cuts into parts; test_random.py has more of them.
ROWS = Problem(0, "prefill", f16, 1, 4, 1, 12, 1500, 80, 40, causality="bottom_right")
MASKED = replace(ROWS, mask=torch.bool, mask_pattern="patches", causality="none")
WIDE = replace(ROWS, q_heads=2, kv_len=700, head_dim=192, value_dim=128, sinks=True)
CUT = (replace(ROWS, kv_len=1100, sinks=True), replace(MASKED, sinks=True), WIDE)


def run(op: str, arguments: dict[str, Any]) -> Results:
    out, lse = getattr(torch.ops.fattn, op)(**arguments)
    return out.cpu(), lse.cpu()


def test_a_map_the_parts_and_the_merge() -> None:
    """Three passes: the planner makes a map where rows of few heads share a mask over many keys."""
    problem = replace(
        MASKED, q_heads=6, kv_heads=6, q_len=60, kv_len=1000, head_dim=128, value_dim=128,
        mask_broadcast=(True, True, False, False),
    )  # fmt: skip
    case = problems.build(problem)
    arguments, _ = case.arguments("mps")
    kernels = [step["kernel"] for step in torch_fattn.explain("prefill", **arguments).passes]
    assert kernels == ["fattn_mask_map", "fattn_prefill", "fattn_merge"]
    with counted_launches() as launches:
        results = run("prefill", arguments)
    assert launches == dict.fromkeys(kernels, 1)
    assert_close(case, *results)


# ---- plans


def parts_of(problem: Problem, **device: Any) -> int:
    step = next(one for one in plan_of(problem, **device)["passes"] if "prefill" in one["kernel"])
    parts: int = step["params"]["parts"]
    return parts


LONG = Problem(0, "prefill", f16, 1, 4, 4, 512, 32768, 128, 128, causality="bottom_right")


@pytest.mark.host_only
def test_one_wave_of_threadgroups() -> None:
    """Sixteen simdgroups on each core. No wave, and no part of one, is left nearly empty."""
    for rows, heads, cores in ((512, 4, 40), (9, 1, 8), (64, 3, 10), (100, 5, 76), (64, 13, 8)):
        problem = replace(LONG, q_len=rows, q_heads=heads, kv_heads=heads)
        step, _ = plan_of(problem, family=9, cores=cores)["passes"]
        threadgroups, held = math.prod(step["grid"]), cores * 16 // int(step["macros"]["FATTN_SIMDGROUPS"])
        waves = -(-threadgroups // held)
        assert threadgroups >= 7 / 8 * waves * held, (rows, heads, cores)
        assert waves <= 8


@pytest.mark.host_only
def test_uncut_calls() -> None:
    """Sequences that fill the GPU, few keys, and hidden keys are not cut; the batch does not matter."""
    assert parts_of(LONG, cores=8) == 1 < parts_of(LONG, cores=40)
    assert parts_of(replace(LONG, q_len=9, kv_len=480)) == 1 < parts_of(replace(LONG, q_len=9, kv_len=512))
    assert parts_of(replace(LONG, kv_len=480), cores=40) == 1
    assert parts_of(replace(LONG, kv_len=481), cores=40) == 2
    assert parts_of(replace(LONG, window_left=300), cores=40) == 1
    assert parts_of(replace(LONG, causality="offset", q_offset=-40), cores=40) == 1
    assert parts_of(replace(LONG, batch=64), cores=40) == parts_of(LONG, cores=40)


@pytest.mark.host_only
def test_a_tile_over_too_many_keys_is_cut() -> None:
    """No threadgroup has more than an eighth of a second of products, at the best rate of M1, whatever the
    rows; of packed ones, half a second."""
    most = 2e10
    for heads, rows, head_dim, kv_len in ((64, 9, 128, 2**26), (64, 4096, 64, 2**23), (32, 20, 256, 2**24)):
        problem = Problem(0, "prefill", f16, 1, heads, heads, rows, kv_len, head_dim, head_dim)
        step, merge = plan_of(problem, cores=8)["passes"]
        shared = int(step["macros"]["FATTN_ROW_GROUPS"])
        groups = shared if head_dim > 128 else int(step["macros"]["FATTN_SIMDGROUPS"])
        tile_rows = 8 * int(step["macros"]["FATTN_ROW_FRAGMENTS"]) * groups
        keys = kv_len / step["params"]["parts"]
        assert keys * tile_rows * 2 * head_dim <= most * 1.01
        assert merge["params"]["parts"] == step["params"]["parts"] > 1


@pytest.mark.host_only
def test_packed_parts_have_one_size() -> None:
    """The part size is the same for all practical capacities."""
    packed = Problem(
        0, "paged_prefill", f16, 2, 32, 8, 900, 2**24, 128, 128, causality="bottom_right",
        q_lens=(900, 1), seq_lens=(9, 9), block_size=16,
    )  # fmt: skip
    few = replace(packed, q_lens=(1, 1), q_len=1)
    longer = replace(packed, kv_len=2**27)
    found = []
    for problem in (packed, few, longer, replace(packed, batch=3, q_lens=(9, 900, 7), seq_lens=(9,) * 3)):
        step, merge = plan_of(problem)["passes"]
        assert merge["threads"] == [32, 1, 1] and merge["params"]["parts"] == step["params"]["parts"] > 1
        assert merge["constants"]["token_major_out"]
        found.append((step["params"]["min_part"], step["macros"]["FATTN_TILE_KEYS"]))
    assert len(set(found)) == 1
    assert [step["kernel"] for step in plan_of(replace(packed, kv_len=2**22))["passes"]] == ["fattn_prefill"]


# ---- parts as a test cuts them


PAGED = Problem(
    0, "paged_prefill", f16, 4, 6, 2, 50, 256, 40, 24, causality="bottom_right", q_lens=(50, 1, 0, 7),
    seq_lens=(240, 65, 9, 7), block_size=16, spare_rows=2, sinks=True,
)  # fmt: skip
FORCED = {
    "paged": (PAGED, 3, 2),
    "paged_int8": (replace(PAGED, kv_format="int8", window_left=100, sink_tokens=40), 4, 1),
    "paged_int4": (replace(PAGED, kv_format="int4", head_dim=64, value_dim=32), 2, 1),
    "paged_wide": (replace(PAGED, head_dim=192, value_dim=128), 5, 2),
    "varlen": (replace(PAGED, op="varlen_prefill", block_size=0, causality="none"), 9, 1),
    "dense": (replace(ROWS, kv_len=200, q_len=50), 7, 1),
    "two_groups": (replace(ROWS, q_heads=6, kv_heads=2, kv_len=200, q_len=9), 2, 1),
    "top_left": (replace(ROWS, kv_len=200, q_len=150, causality="top_left", q_offset=0), 4, 1),
}


TAKES_REST = "part + 1 < params.parts && "


def run_cut(
    problem: Problem,
    parts: int,
    least: int,
    mutate: direct_launch.Mutate | None = None,
    simdgroups: int = 4,
    **params: int,
) -> tuple[problems.Case, Results]:
    case = problems.build(problem)
    plan = direct_launch.plan_of(problem.op, case.arguments("cpu")[0])
    direct_launch.cut_prefill(plan, parts, least, simdgroups)
    direct_launch.set_params(plan["passes"][0], params)
    mutants = {} if mutate is None else {step["kernel"]: mutate for step in plan["passes"]}
    return case, direct_launch.run(case, mutants, plan=plan)


@needs_emulator
@pytest.mark.parametrize("name", FORCED)
def test_any_parts_give_the_result(name: str) -> None:
    case, results = run_cut(*FORCED[name])
    assert_close(case, *results)


@needs_emulator
@pytest.mark.parametrize("twin", [False, True])
def test_the_last_part_takes_the_rest(twin: bool) -> None:
    """A packed sequence may have more keys than max_seqlen_k has parts for. The twin forgets it."""
    assert TAKES_REST in direct_launch.kernel_text("prefill.metal")
    forgets = (lambda text: text.replace(TAKES_REST, "")) if twin else None
    case, results = run_cut(FORCED["varlen"][0], 2, 1, forgets, largest_part=1)
    with pytest.raises(AssertionError) if twin else contextlib.nullcontext():
        assert_close(case, *results)


def packed_in_parts(parts: int, least: int, mutate: direct_launch.Mutate | None = None) -> Results:
    case, results = run_cut(PAGED, parts, least, mutate, simdgroups=1)
    assert_close(case, *results)
    return results


@needs_emulator
def test_parts_after_the_last_key_do_not_change_the_result() -> None:
    """Empty parts, as in a larger capacity, change nothing; nor does a merge of one part."""
    few, many = packed_in_parts(3, 4), packed_in_parts(40, 4)
    of_five, of_one = packed_in_parts(5, 1000), packed_in_parts(1, 1000)
    assert same_bits(few, many) and same_bits(of_five, of_one)
    assert same_bits(of_one, direct_launch.run(problems.build(PAGED))), "as without a merge"
    assert not same_bits(few, of_one), "the control: cut at another key"


@needs_emulator
def test_parts_by_the_capacity_are_noticed() -> None:
    """The control: sizes of parts that the capacity decides give results within tolerance, in other bits."""
    old, new = "clamp(equal, params.min_part", "clamp(equal, 1"
    assert old in direct_launch.kernel_text("prefill.metal")
    found = [packed_in_parts(parts, 4, lambda text: text.replace(old, new)) for parts in (3, 40)]
    assert not same_bits(found[0], found[1])


@needs_emulator
def test_empty_parts_cost_next_to_nothing() -> None:
    """Rows from the first key on see few of 1,500: parts behind them load nothing and multiply nothing."""
    problem = replace(ROWS, q_len=16, kv_len=1500, causality="top_left", q_offset=0)
    case = problems.build(problem)
    arguments, _ = case.arguments("cpu")
    counted = []
    for parts in (1, 30):
        plan = direct_launch.plan_of("prefill", arguments)
        direct_launch.cut_prefill(plan, parts, 1)
        buffers = direct_launch.buffers_of("prefill", arguments, plan)
        counters = direct_launch.launch(plan["passes"][0], buffers, checks="race,bounds,uninit,bytes")
        counted.append((counters["products"], counters["bytes_read"]["device"], counters["exps"]))
    assert counted[0] == counted[1] and counted[0][0] > 0
