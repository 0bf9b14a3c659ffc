"""Seeded faults in decode_wide: as in test_mutants.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests import problems
from tests.conftest import needs_emulator
from tests.mutants import ORDERS, Mutant, assert_caught, assert_silent_and_right, removed_barriers
from tests.problems import Problem

pytestmark = needs_emulator

f32, f16, bf16 = problems.DTYPES

# 15 packed rows of wide heads that do not divide evenly; a full cache, and columns in chunks of 16 bytes;
# values that are columns of their keys.
WIDE = Problem(16, "decode", f16, 1, 5, 1, 3, 75, 136, 200, seq_lens=(69,), sinks=True)
FULL_WIDE = Problem(17, "decode", f32, 1, 2, 1, 1, 16, 136, 200, seq_lens=(16,))
LATENT = Problem(
    18, "paged_decode", f32, 1, 4, 1, 2, 64, 64, 40, value_in_key=True, seq_lens=(61,), block_size=16
)
WIDE_INT8 = replace(WIDE, kv_format="int8")
# Some keys are hidden from all rows by the mask, and their scales NaN.
HIDDEN_INT8 = replace(WIDE, kv_format="int8", mask=torch.bool, mask_broadcast=(True,) * 3 + (False,))
LATENT_INT4 = replace(LATENT, kv_format="int4", head_dim=96, value_dim=64)
CONTROLS = (WIDE, FULL_WIDE, LATENT, WIDE_INT8, HIDDEN_INT8, LATENT_INT4)

MUTANTS = [
    *removed_barriers("decode_wide", WIDE),
    # Columns and scores of another simdgroup.
    Mutant(
        "wide_all_simdgroups_take_the_first_columns",
        FULL_WIDE,
        "fattn_decode_wide",
        "share * 4 * kWide +",
        "0 * 4 * kWide +",
    ),
    Mutant(
        "wide_narrow_columns_of_the_next_simdgroup",
        WIDE,
        "fattn_decode_wide",
        "share * 4 * kNarrow +",
        "(share + 1) * 4 * kNarrow +",
    ),
    Mutant(
        "wide_reads_past_the_last_column",
        FULL_WIDE,
        "fattn_decode_wide",
        "kEven || column < kTo",
        "kEven || column <= kTo",
        "bounds",
    ),
    Mutant(
        "wide_values_of_the_next_simdgroup",
        WIDE,
        "fattn_decode_wide",
        "values[k].read(value_row, simdgroup,",
        "values[k].read(value_row, simdgroup ^ 1,",
    ),
    Mutant(
        "wide_leaves_out_a_simdgroup",
        WIDE,
        "fattn_decode_wide",
        "for (int s = 0; s < kSimdgroups; s++)",
        "for (int s = 1; s < kSimdgroups; s++)",
    ),
    Mutant(
        "wide_scores_of_the_first_rows",
        WIDE,
        "fattn_decode_wide",
        "return thread_index / 64 % kRowGroups * 8 +",
        "return 0 * 8 +",
    ),
    Mutant(
        "latent_columns_meet_those_of_the_key_alone",
        LATENT,
        "fattn_decode_wide",
        "k, SharedColumns::kFragments, KeyColumns::kFragments, run)",
        "k, 0, KeyColumns::kFragments, run)",
    ),
    Mutant(
        "latent_columns_of_the_value_meet_others",
        LATENT,
        "fattn_decode_wide",
        "k, 0, SharedColumns::kFragments, run)",
        "k, KeyColumns::kFragments, SharedColumns::kFragments, run)",
    ),
    # Quantised caches.
    Mutant(
        "wide_scale_of_the_next_key",
        WIDE_INT8,
        "fattn_decode_wide",
        "put_key(thread_index, key_scale)",
        "put_key(thread_index ^ 1, key_scale)",
    ),
    Mutant(
        "wide_scales_of_the_first_fragment",
        WIDE_INT8,
        "fattn_decode_wide",
        "scales.of_key(k * 8 + key_in_fragment)",
        "scales.of_key(key_in_fragment)",
    ),
    Mutant(
        "wide_values_by_the_scales_of_keys",
        WIDE_INT8,
        "fattn_decode_wide",
        "scales.of_values(k, at)",
        "scales.of_keys(k, at)",
    ),
    Mutant(
        "wide_scales_overtake_the_step_before",
        WIDE_INT8,
        "fattn_decode_wide",
        "    scales.put_key(thread_index, key_scale);",
        "    scales.put_key(thread_index, key_scale);\n    scales.put_value(thread_index, value_scale);",
        "race",
    ),
    Mutant(
        "wide_hidden_scale_counts",
        HIDDEN_INT8,
        "fattn_decode_wide",
        "const bool sees_second = !kHidden ||",
        "const bool sees_second = true ||",
    ),
    Mutant(
        "latent_groups_of_the_first_columns",
        LATENT_INT4,
        "fattn_decode_wide",
        "column / kInt4Group * 2",
        "0",
    ),
]


@pytest.mark.parametrize("problem", CONTROLS, ids=str)
@pytest.mark.parametrize("order", ORDERS)
def test_the_controls_are_silent_and_right(problem: Problem, order: str) -> None:
    assert_silent_and_right(problem, order)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_mutant_is_caught(mutant: Mutant) -> None:
    assert_caught(mutant)
