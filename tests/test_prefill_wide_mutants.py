"""Seeded faults in prefill_wide: as in test_mutants.py."""

from __future__ import annotations

from dataclasses import replace

import pytest

import torch_fattn
from tests import direct_launch, problems
from tests.accuracy import assert_close
from tests.conftest import needs_emulator
from tests.mutants import ORDERS, Mutant, assert_caught, assert_silent_and_right, removed_barriers
from tests.problems import Problem

pytestmark = needs_emulator

f32, f16, bf16 = problems.DTYPES

# Several steps, whole and ragged, a ragged last tile of rows, and columns that do not divide evenly.
WIDE = Problem(0, "prefill", f16, 1, 2, 1, 43, 100, 136, 200, causality="bottom_right", sinks=True)
# Two simdgroups for each key fragment, which sum a share of the columns each.
SUMS = Problem(1, "prefill", f16, 1, 1, 1, 20, 70, 280, 264)
# Two groups of rows, and blocked sums.
GROUPS = Problem(2, "prefill", f32, 1, 1, 1, 20, 75, 136, 24, causality="bottom_right")
WINDOW = replace(WIDE, kv_len=200, window_left=70, sink_tokens=40)
# A chunk of a prompt, a token, a sequence without rows, a ragged one; blocks that end within a step.
PACKED = Problem(
    *(3, "paged_prefill", f16, 4, 6, 2, 20, 80, 136, 24),
    causality="bottom_right",
    q_lens=(20, 1, 0, 7),
    seq_lens=(75, 65, 9, 7),
    block_size=16,
    spare_rows=2,
)
PACKED_INT8 = replace(PACKED, kv_format="int8", window_left=20)
PACKED_INT4 = replace(PACKED, kv_format="int4", head_dim=160, value_dim=32)
CONTROLS = (WIDE, SUMS, GROUPS, WINDOW, PACKED, PACKED_INT8, PACKED_INT4)


def mutant(name: str, problem: Problem, old: str, new: str, finding: str = "", nth: int = 0) -> Mutant:
    return Mutant(name, problem, "fattn_prefill_wide", old, new, finding, nth)


MUTANTS = [
    *removed_barriers("prefill_wide", WIDE),
    mutant("products_have_one_place", WIDE, "place ^= 1;", "place ^= 0;", "race"),
    mutant(
        "scales_have_one_place",
        PACKED_INT8,
        "shared_scales + place * kTileKeys",
        "shared_scales + 0 * kTileKeys",
        "race",
    ),
    mutant(
        "groups_share_products",
        GROUPS,
        "(place * kRowGroups + row_group) * kGroupScores",
        "(place * kRowGroups + 0) * kGroupScores",
        "race",
    ),
    mutant(
        "all_simdgroups_make_the_first_products",
        WIDE,
        "share / kSumShares * kOwnFragments + own",
        "own",
        "race|uninit",
    ),
    mutant("leaves_out_a_share_of_the_columns", SUMS, "for (int share = 1;", "for (int share = 2;"),
    mutant("all_shares_are_the_first", SUMS, "share % kSumShares, totals[r]", "0, totals[r]", "race"),
    mutant(
        "narrow_columns_meet_the_first_of_the_query",
        WIDE,
        "first_piece + KeyColumns::kWide / kPieceElements",
        "first_piece",
    ),
    mutant(
        "products_of_the_next_row", WIDE, "block[at.pair * 16 + 8 + at.row]", "block[at.pair * 16 + at.row]"
    ),
    mutant(
        "leaves_out_a_block_of_sums", GROUPS, "block.add_to(totals);\n      block.clear();", "block.clear();"
    ),
    mutant(
        "leaves_out_the_last_fragment",
        WIDE,
        "(own.end - first_key + 7) / 8",
        "(own.end - first_key) / 8",
    ),
    mutant(
        "takes_a_ragged_step_as_whole",
        WIDE,
        "return ranges.all_see(first_key, first_key + 1) &&",
        "return ranges.all_see(first_key, first_key - 31) &&",
    ),
    mutant(
        "keys_of_the_first_fragment_alone",
        WIDE,
        "keys.ranges = rows.ranges_of(group_row, kRowFragments * 8, params)",
        "keys.ranges = rows.ranges_of(group_row, 8, params)",
    ),
    mutant(
        "values_of_the_next_simdgroup",
        WIDE,
        "runs[k].read(row, share, at)",
        "runs[k].read(row, share ^ 1, at)",
    ),
    mutant(
        "values_of_keys_below",
        PACKED,
        "places.find(keys.source.table, k * 8 + at.row);\n    if",
        "places.find(keys.source.table, k * 8);\n    if",
    ),
    mutant("query_of_the_first_group", GROUPS, "row_group * (kGroupPieces", "0 * (kGroupPieces", "race"),
    mutant("query_row_twice", WIDE, "rows.row(pair + 1, params)", "rows.row(pair, params)"),
    mutant("stores_rows_that_do_not_exist", WIDE, "place < 0", "place < -1", "bounds"),
    mutant(
        "scale_of_the_next_key",
        PACKED_INT8,
        "put_value(thread_index, read",
        "put_value(thread_index ^ 1, read",
    ),
]


@pytest.mark.parametrize("problem", CONTROLS, ids=str)
@pytest.mark.parametrize("order", ORDERS)
def test_the_controls_are_silent_and_right(problem: Problem, order: str) -> None:
    assert_silent_and_right(problem, order)


@pytest.mark.parametrize("problem", [SUMS, replace(PACKED_INT8, head_dim=264)], ids=str)
def test_values_that_are_asked_for_early(problem: Problem) -> None:
    """As the planner has it for newer GPUs than the one of the other tests."""
    case = problems.build(problem)
    plan = torch_fattn.explain(problem.op, **case.arguments("cpu")[0], family=9, cores=8).data
    assert plan["passes"][0]["macros"]["FATTN_EARLY_LOADS"] == "true"
    assert_close(case, *direct_launch.run(case, plan=plan))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_mutant_is_caught(mutant: Mutant) -> None:
    assert_caught(mutant)
