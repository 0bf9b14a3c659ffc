"""Seeded faults in logits.metal and softcap.h are found, by the result or by the emulator's checks; the same
launches without a fault are silent and right."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tests import direct_launch, logits_problems
from tests.conftest import needs_emulator
from tests.logits_problems import DTYPES, LogitsProblem

pytestmark = needs_emulator

f32, f16, bf16 = DTYPES
# Rows of one simdgroup, off vector boundaries and on them, by three strides; of several; longer than the
# threads hold.
SHORT = LogitsProblem(0, "softmax", f32, (3, 3, 70), "padded")
ALIGNED = LogitsProblem(0, "softmax", f16, (3, 3, 72), "padded", 5.0)
SHARED = LogitsProblem(0, "softmax", f16, (6, 1300), "offset", 5.0)
DEEP = LogitsProblem(0, "softmax", bf16, (2, 3, 2, 40), "padded")
LONG = LogitsProblem(0, "softmax", f32, (6, 16390))
CAPPED = LogitsProblem(0, "softcap", f32, (3, 2, 72), "padded", 5.0)
ODD = LogitsProblem(0, "softcap", f16, (2, 3, 333), "every_other", 5.0)
WHOLE = LogitsProblem(0, "softcap", f16, (9, 1001), "contiguous", 0.5)


def launch(problem: LogitsProblem, old: str = "", new: str = "", nth: int = 0, *, size: int = 0) -> None:
    """Runs the kernel with the change of text, and raises for a finding or a wrong result."""

    def change(text: str) -> str:
        pieces = text.split(old)
        assert len(pieces) > nth + 1, f"no occurrence {nth} of {old!r}"
        return old.join(pieces[: nth + 1]) + new + old.join(pieces[nth + 1 :])

    buffers, case = logits_problems.arguments(problem)
    (step,) = direct_launch.plan_of(problem.op, problem.call(buffers["logits"]))["passes"]
    if size:
        direct_launch.cut_into_slices(step, size)
    direct_launch.launch(step, buffers, change if old else None)
    case.assert_close(buffers["out"])


@pytest.mark.parametrize("size", [0, 2], ids=["whole", "sliced"])
@pytest.mark.parametrize("problem", [SHORT, ALIGNED, DEEP, SHARED, LONG, CAPPED, ODD, WHOLE], ids=str)
def test_controls(problem: LogitsProblem, size: int) -> None:
    launch(problem, size=size)


@dataclass(frozen=True)
class Mutant:
    name: str
    problem: LogitsProblem
    old: str
    new: str
    nth: int = 0
    size: int = 0


BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
MUTANTS = [
    Mutant("a_row_too_many", SHORT, "row >= params.rows", "row > params.rows"),
    Mutant("a_column_too_many", SHORT, "column + e < params.columns", "column + e <= params.columns"),
    Mutant("a_column_too_many_is_written", SHORT, "column + e < params.columns", "true", 1),
    Mutant("columns_beyond_the_row_count", SHORT, "x[v][e] = -INFINITY;", "x[v][e] = 0.0f;"),
    Mutant("strides_of_the_wrong_dimension", DEEP, "params.strides[dim]", "params.strides[0]", 0),
    Mutant("rows_that_lie_together", SHORT, "return offset + row * params", "return offset; //"),
    Mutant("the_sum_of_a_lane", SHORT, "simd_sum(x)", "x"),
    Mutant("the_largest_of_a_lane", SHORT, "simd_max(x)", "x"),
    Mutant("nothing_is_subtracted", SHORT, "x[v][e] - origin", "x[v][e]"),
    Mutant("hidden_rows_are_nan", SHORT, "total == 0.0f ? 0.0f : 1.0f / total", "1.0f / total"),
    Mutant("minus_infinity_minus_itself", SHORT, "largest == -INFINITY ? 0.0f : largest", "largest"),
    Mutant("the_cap_shows_what_is_hidden", ALIGNED, "fc_softcap && logit != -INFINITY", "fc_softcap"),
    Mutant("no_cap", ALIGNED, "fc_softcap && logit != -INFINITY", "false"),
    Mutant("fast_tanh", ALIGNED, "precise::tanh", "fast::tanh"),
    Mutant("a_cap_on_one_side", ALIGNED, "cap * precise::tanh", "precise::tanh"),
    Mutant("a_vector_too_many", ALIGNED, "fc_vector_loads && column < params.columns", "fc_vector_loads"),
    Mutant("every_vector_the_first", SHARED, "first + (v * kRowThreads", "first + (0 * kRowThreads", 0),
    Mutant("largest_of_a_simdgroup", SHARED, "simd_max(lane < kRowSimdgroups ? shared[lane] : -INFINITY)",
           "largest"),
    Mutant("sum_of_a_simdgroup", SHARED, "simd_sum(lane < kRowSimdgroups ? shared[lane] : 0.0f)", "total"),
    Mutant("no_barrier_for_the_largest", SHARED, BARRIER, "", 0),
    Mutant("no_barrier_for_the_sum", SHARED, BARRIER, "", 1),
    Mutant("simdgroups_that_are_not_there", SHARED, "lane < kRowSimdgroups ?", "true ?", 1),
    Mutant("a_block_left_out", LONG, "first < columns; first += kBlockColumns", "false; first += 1", 0),
    Mutant("a_block_not_written", LONG, "first < columns; first += kBlockColumns", "false; first += 1", 1),
    Mutant("the_sum_is_not_shrunk", LONG, "total = total * precise::exp(largest - origin)", "total = total"),
    Mutant("the_largest_of_the_last_block", LONG, "fmax(largest, block.largest()), shared",
           "block.largest(), shared"),
    Mutant("weights_are_not_weighed_again", LONG, "    block.weigh(origin);\n", ""),
    Mutant("an_element_too_many", ODD, "kLogitsVector, count)", "kLogitsVector, count + 1)"),
    Mutant("a_vector_over_the_end", WHOLE, "first + kLogitsVector <= count", "first < count"),
    Mutant("columns_side_by_side", ODD, "* params.columns) * params.column_stride", "* params.columns)"),
    Mutant("the_first_row_only", CAPPED, "params.rows == 1 ? 0 : uint(element) / uint(params.columns)", "0"),
    Mutant("fast_tanh_of_a_large_number", WHOLE, "precise::tanh", "fast::tanh"),
    Mutant("the_first_slice_again", SHARED, "slice.first_group + group", "long(group)", 0, 2),
    Mutant("the_first_slice_again_of_softcap", WHOLE, "slice.first_group + group", "long(group)", 0, 1),
]  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_is_caught(mutant: Mutant) -> None:
    with pytest.raises((AssertionError, RuntimeError)) as caught:
        launch(mutant.problem, mutant.old, mutant.new, mutant.nth, size=mutant.size)
    assert "occurrence" not in str(caught.value) and "error:" not in str(caught.value), str(caught.value)
