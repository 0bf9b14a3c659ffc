"""Seeded faults in our kernels are found; the same launch without the fault is silent and right. Those of
prefill are in test_prefill_mutants.py, those of decode_wide in test_wide_mutants.py.

Each mutant changes one place of a kernel's text, or one binding, and is launched under the emulator's checks.
It is caught when the check that it names reports it or, where it names none, by the accuracy rule.
"""

from __future__ import annotations

import pytest
import torch

from tests import direct_launch, problems
from tests.accuracy import assert_close
from tests.conftest import needs_emulator
from tests.mutants import BARRIER, ORDERS, Mutant, assert_caught, assert_silent_and_right, removed_barriers
from tests.problems import Problem

pytestmark = needs_emulator

f32, f16, bf16 = problems.DTYPES

# 18 packed rows: two fragments and a second threadgroup of rows.
DECODE = Problem(1, "decode", f32, 2, 9, 1, 2, 75, 40, 24, seq_lens=(75, 44))
SPLIT = Problem(2, "decode", f16, 1, 2, 1, 1, 1400, 112, 24, seq_lens=(1400,))  # more parts than simdgroups
PAGED = Problem(3, "paged_decode", f32, 2, 4, 2, 3, 96, 40, 24, seq_lens=(96, 37), block_size=16)
# Full to the last slot, and ragged against the kernel's step: one key too many is outside the cache.
FULL = Problem(4, "decode", f32, 1, 2, 1, 1, 75, 40, 24, seq_lens=(75,))
LAST_BLOCK = Problem(5, "paged_decode", f32, 2, 2, 1, 1, 112, 40, 24, seq_lens=(97, 33), block_size=16)
# Three chunks and a sink; a window over the end of a chunk, and sink tokens; a draft token that ends a step.
SINKS = Problem(8, "decode", f16, 1, 2, 1, 1, 600, 40, 24, seq_lens=(600,), sinks=True)
WINDOW = Problem(
    9, "decode", f32, 2, 2, 1, 2, 700, 40, 24, seq_lens=(530, 301), window_left=60, sink_tokens=5
)
TREE = Problem(10, "decode", f32, 1, 2, 1, 3, 80, 40, 24, seq_lens=(66,), tree="shared")
# Ragged steps, and lengths that end in the middle of one.
INT8 = Problem(11, "decode", f16, 1, 2, 1, 1, 75, 40, 24, seq_lens=(70,), kv_format="int8")
PAGED_INT8 = Problem(
    12, "paged_decode", f32, 2, 4, 2, 3, 96, 40, 24, seq_lens=(96, 37), block_size=16, kv_format="int8"
)
FP8 = Problem(13, "decode", f32, 1, 2, 1, 1, 75, 40, 24, seq_lens=(70,), kv_format="fp8_e4m3")
INT4 = Problem(14, "decode", f16, 1, 2, 1, 1, 75, 64, 32, seq_lens=(70,), kv_format="int4")
# Some keys are hidden from all rows by the mask, and their scales NaN.
HIDDEN_INT8 = Problem(
    15,
    "decode",
    f16,
    1,
    2,
    1,
    2,
    75,
    40,
    24,
    seq_lens=(70,),
    mask=torch.bool,
    mask_broadcast=(True,) * 3 + (False,),
    kv_format="int8",
)
QUANTISED = (INT8, PAGED_INT8, FP8, INT4, HIDDEN_INT8)
CONTROLS = (DECODE, SPLIT, PAGED, FULL, LAST_BLOCK, SINKS, WINDOW, TREE, *QUANTISED)
VIEWS = ("padded_rows", "padded_rows", "padded_rows")  # views that start 8 elements into their storage

MUTANTS = [
    *removed_barriers("decode", SPLIT),
    # Off by one.
    Mutant(
        "decode_reads_past_the_length",
        FULL,
        "fattn_decode",
        "place.exists = key < length &&",
        "place.exists = key <= length &&",
        "bounds",
    ),
    Mutant(
        "paged_wrong_block_for_the_last_key",
        LAST_BLOCK,
        "fattn_decode",
        "uint(key) / fc_block_size",
        "uint(min(key, length - 2)) / fc_block_size",
    ),
    Mutant(
        "decode_stops_a_step_early",
        DECODE,
        "fattn_decode",
        "const int units = (to - from + unit - 1) / unit;",
        "const int units = (to - from) / unit;",
    ),
    Mutant(
        "decode_skips_a_chunk",
        SPLIT,
        "fattn_decode",
        "return visits[part] * keys;",
        "return visits[max(part, 1)] * keys;",
    ),
    Mutant(
        "merge_reads_a_part_too_many",
        SPLIT,
        "fattn_merge",
        "own < parts.count ?",
        "own <= parts.count ?",
        "bounds",
    ),
    # Windows, sinks, trees.
    Mutant(
        "window_begins_late",
        WINDOW,
        "fattn_decode",
        "visible.limit[0] - 1 - limits.window_left;",
        "visible.limit[0] - limits.window_left;",
    ),
    Mutant(
        "window_begins_early",
        WINDOW,
        "fattn_decode",
        "visible.limit[0] - 1 - limits.window_left;",
        "visible.limit[0] - 2 - limits.window_left;",
    ),
    Mutant(
        "window_is_loaded_late",
        WINDOW,
        "fattn_decode",
        "clamp(first_position - span.window_left, 0, length)",
        "clamp(first_position - span.window_left + 1, 0, length)",
    ),
    Mutant(
        "window_takes_its_first_step_as_whole",
        WINDOW,
        "fattn_decode",
        "max(length - 1 - span.window_left, 0)",
        "max(length - 9 - span.window_left, 0)",
    ),
    Mutant(
        "window_skips_the_chunk_it_begins_in",
        WINDOW,
        "fattn_decode",
        "clamp(ranges.begin / unit - visits.first,",
        "clamp((ranges.begin + unit - 1) / unit - visits.first,",
    ),
    Mutant(
        "sink_tokens_one_short",
        WINDOW,
        "fattn_decode",
        "key < sink_end[r];",
        "key < sink_end[r] - 1;",
    ),
    Mutant(
        "sink_counts_in_every_chunk",
        SINKS,
        "fattn_decode",
        "item.part == 0 && key_group == 0",
        "key_group == 0",
    ),
    Mutant(
        "sink_counts_in_every_simdgroup",
        SINKS,
        "fattn_decode",
        "item.part == 0 && key_group == 0",
        "item.part == 0",
    ),
    Mutant(
        "tree_mask_of_the_next_token",
        TREE,
        "fattn_decode",
        "(drafts[r] >> (key - first_draft))",
        "(drafts[r] >> (key - first_draft + 1))",
    ),
    Mutant(
        "tree_mask_hides_no_own_token",
        TREE,
        "fattn_decode",
        "first_position + (fc_tree ? 0 : 1)",
        "first_position + 1",
    ),
    # A stale maximum.
    Mutant(
        "decode_keeps_the_old_scale",
        SPLIT,
        "fattn_decode",
        "weight_of(row_max[r] - origin)",
        "weight_of(0.0f)",
    ),
    Mutant(
        "merge_by_the_maximum_of_a_lane",
        SPLIT,
        "fattn_merge",
        "fmax(sum.largest, simd_max(lse))",
        "fmax(sum.largest, lse)",
    ),
    # A wrong head.
    Mutant(
        "decode_next_key_head",
        DECODE,
        "fattn_decode",
        "key.first = kv_head * params.key.head",
        "key.first = (kv_head + 1) * params.key.head",
        "bounds",
    ),
    Mutant(
        "paged_value_of_the_first_head",
        PAGED,
        "fattn_decode",
        "value.first = kv_head * params.value.head",
        "value.first = 0 * params.value.head",
    ),
    # Quantised caches.
    Mutant(
        "scale_of_the_next_key",
        INT8,
        "fattn_decode",
        "pairs[k * 4 + at.pair]",
        "pairs[k * 4 + (at.pair ^ 1)]",
    ),
    Mutant(
        "scale_of_the_first_head",
        PAGED_INT8,
        "fattn_decode",
        "+ head * strides.head +",
        "+ 0 * strides.head +",
    ),
    Mutant(
        "scale_of_another_block",
        PAGED_INT8,
        "fattn_decode",
        "(fc_paged ? uint(place.block) : batch) * strides.batch",
        "batch * strides.batch",
    ),
    Mutant(
        "values_by_the_scales_of_keys",
        INT8,
        "fattn_decode",
        "scales.of_values(k, at)",
        "scales.of_keys(k, at)",
    ),
    Mutant(
        "scales_are_in_the_sum_of_the_weights",
        INT8,
        "fattn_decode",
        "const float2 pair = scales.of_values(k, at);",
        "const float2 pair = scales.of_values(k, at); attention.row_sum[0] *= pair[0];",
    ),
    Mutant(
        "scales_are_read_before_all_are_there",
        INT8,
        "fattn_decode",
        "scales.put_value(lane, value_scale);\n  }\n  simdgroup_barrier(mem_flags::mem_threadgroup);",
        "scales.put_value(lane, value_scale);\n  }",
        "race",
    ),
    Mutant(
        "a_hidden_scale_counts",
        HIDDEN_INT8,
        "fattn_decode",
        "const bool sees_second = !kHidden ||",
        "const bool sees_second = true ||",
    ),
    Mutant("int8_without_a_sign", INT8, "fattn_decode", "0x64806480", "0x64006400"),
    Mutant("fp8_of_another_bias", FP8, "fattn_decode", "0x5c005c00", "0x60006000"),
    Mutant(
        "nibbles_swapped", INT4, "fattn_decode", "(word >> (4 * k)) & 0x0", "(word >> (4 * (k ^ 1))) & 0x0"
    ),
    Mutant("minimum_dropped", INT4, "fattn_decode", "float2(group[1])", "float2(0.0f)"),
    Mutant("minimum_of_another_group", INT4, "fattn_decode", "column / kInt4Group * 2", "0"),
    # Shared memory that nobody wrote.
    Mutant(
        "decode_forgets_a_maximum",
        SPLIT,
        "fattn_decode",
        "if (at.pair == 0) {\n      row_max[row]",
        "if (at.pair == 0 && at.row != 1) {\n      row_max[row]",
        "uninit",
    ),
]


@pytest.mark.parametrize("problem", CONTROLS, ids=str)
@pytest.mark.parametrize("order", ORDERS)
def test_the_controls_are_silent_and_right(problem: Problem, order: str) -> None:
    assert_silent_and_right(problem, order)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_mutant_is_caught(mutant: Mutant) -> None:
    assert_caught(mutant)


@pytest.mark.parametrize("operand", ["query", "key", "value"])
@pytest.mark.parametrize(
    "problem",
    [
        Problem(6, "prefill", f32, 1, 2, 1, 9, 21, 40, 24, layouts=VIEWS),
        Problem(7, "paged_decode", f16, 1, 2, 1, 1, 32, 40, 24, seq_lens=(29,), block_size=8, layouts=VIEWS),
    ],
    ids=str,
)
def test_dropped_storage_offset_is_caught(problem: Problem, operand: str) -> None:
    """The start of a storage is not the start of the view: the NaN before it gives the fault away."""
    case = problems.build(problem)
    assert_close(case, *direct_launch.run(case))
    name = operand if operand in case.operands else f"{operand}_cache"
    with pytest.raises(AssertionError):
        assert_close(case, *direct_launch.run(case, drop_offset_of=name, checks=""))


def test_a_benign_change_is_not_reported() -> None:
    """The other control: a barrier more, and a comment, change nothing."""
    case = problems.build(DECODE)
    mutate = {"fattn_decode": lambda text: text.replace(BARRIER, f"{BARRIER}; {BARRIER}")}
    out, lse = direct_launch.run(case, mutate)
    plain, plain_lse = direct_launch.run(case)
    assert torch.equal(out, plain) and torch.equal(lse, plain_lse)
