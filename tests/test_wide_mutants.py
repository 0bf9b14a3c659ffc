"""Seeded faults in decode_wide: as in test_mutants.py."""

from __future__ import annotations

import pytest

from tests import direct_launch, problems
from tests.accuracy import assert_close
from tests.conftest import needs_emulator
from tests.problems import Problem
from tests.test_mutants import Mutant, assert_caught, removed_barriers

pytestmark = needs_emulator

f32, f16, bf16 = problems.DTYPES

# 15 packed rows of wide heads that do not divide evenly; a full cache, and columns in chunks of 16 bytes;
# values that are columns of their keys.
WIDE = Problem(16, "decode", f16, 1, 5, 1, 3, 75, 136, 200, seq_lens=(69,), sinks=True)
FULL_WIDE = Problem(17, "decode", f32, 1, 2, 1, 1, 16, 136, 200, seq_lens=(16,))
LATENT = Problem(
    18, "paged_decode", f32, 1, 4, 1, 2, 64, 64, 40, value_in_key=True, seq_lens=(61,), block_size=16
)
CONTROLS = (WIDE, FULL_WIDE, LATENT)

MUTANTS = [
    *removed_barriers("decode_wide", WIDE),
    # Columns and scores of another simdgroup.
    Mutant(
        "wide_all_simdgroups_take_the_first_columns",
        FULL_WIDE,
        "fattn_decode_wide",
        "simdgroup * 4 * kWide +",
        "0 * 4 * kWide +",
    ),
    Mutant(
        "wide_narrow_columns_of_the_next_simdgroup",
        WIDE,
        "fattn_decode_wide",
        "simdgroup * 4 * kNarrow +",
        "(simdgroup + 1) * 4 * kNarrow +",
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
        "read_share<0, kValueDim>(row, simdgroup,",
        "read_share<0, kValueDim>(row, simdgroup ^ 1,",
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
        "k, kSharedFragments, kKeyFragmentsAlone, alone)",
        "k, 0, kKeyFragmentsAlone, alone)",
    ),
    Mutant(
        "latent_reads_its_values_from_the_end",
        LATENT,
        "fattn_decode_wide",
        "      if (!kValueInKey) {",
        "      row += 8;\n      if (!kValueInKey) {",
    ),
]


@pytest.mark.parametrize("problem", CONTROLS, ids=str)
@pytest.mark.parametrize("order", ["forward", "reverse", "random:3"])
def test_the_controls_are_silent_and_right(problem: Problem, order: str) -> None:
    case = problems.build(problem)
    assert_close(case, *direct_launch.run(case, order=order))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_mutant_is_caught(mutant: Mutant) -> None:
    assert_caught(mutant)
