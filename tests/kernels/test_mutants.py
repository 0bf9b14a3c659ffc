"""The emulator finds faults of every kernel, and the same launches without a fault are silent: missing
barriers, reads outside a buffer and of what nobody wrote. tests/mutation has thousands more; test_counts.py
has work that is done for nothing.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from functools import cache, partial

import pytest
import torch

from tests.conftest import needs_emulator
from tests.helpers import direct_launch, problems
from tests.helpers.accuracy import assert_close
from tests.helpers.cache_problems import WriteProblem
from tests.helpers.logits_problems import LogitsProblem
from tests.helpers.problems import Problem
from tests.mutation.judge import judge
from tests.mutation.operators import Mutant, all_mutants, changed
from tests.mutation.trial import Device, Trial, of_logits, of_map, of_merge, of_problem, of_write
from tests.mutation.trials import all_trials

pytestmark = needs_emulator

f32, f16, bf16 = problems.DTYPES

# 18 packed rows: two fragments and a second threadgroup of rows.
DECODE = Problem(1, "decode", f32, 2, 9, 1, 2, 75, 40, 24, seq_lens=(75, 44))
# 15 packed rows of wide heads that do not divide evenly; columns in chunks of 16 bytes.
WIDE = Problem(16, "decode", f16, 1, 5, 1, 3, 75, 136, 200, seq_lens=(69,), sinks=True)
# Whole and ragged steps, several of each, and a ragged last tile of rows.
PREFILL = Problem(0, "prefill", f16, 1, 2, 1, 43, 150, 64, 40, causality="bottom_right")
# A chunk of a prompt, a token, a sequence without rows, a ragged one; blocks that end within a step.
PACKED = Problem(
    *(13, "paged_prefill", f16, 4, 6, 2, 50, 128, 64, 32),
    causality="bottom_right",
    q_lens=(50, 1, 0, 7),
    seq_lens=(113, 65, 9, 7),
    block_size=16,
    spare_rows=2,
)
PROBLEMS = {
    "decode": DECODE,
    # More parts than simdgroups; values that take two rounds.
    "decode-split": Problem(2, "decode", f16, 1, 3, 1, 1, 1400, 112, 72, seq_lens=(1400,)),
    # Up to four chunks in one launch.
    "decode-short": Problem(21, "decode", f16, 6, 3, 1, 1, 256, 112, 72, seq_lens=(256, 250, 0, 1, 200, 44)),
    "decode-int8": Problem(11, "decode", f16, 2, 4, 2, 2, 300, 64, 32, seq_lens=(289, 21), kv_format="int8"),
    "decode-paged": Problem(
        0, "paged_decode", f16, 2, 4, 1, 2, 128, 64, 32, seq_lens=(120, 61), block_size=64
    ),
    "wide": WIDE,
    # Full to the last slot, as the next: one key too many is outside the cache.
    "wide-full": Problem(17, "decode", f32, 1, 3, 1, 1, 16, 136, 200, seq_lens=(16,)),
    "wide-int8": replace(WIDE, kv_format="int8"),
    "vector-full": Problem(19, "decode", f32, 1, 2, 1, 1, 75, 40, 24, seq_lens=(75,)),
    # One row for each of as many heads as threadgroups, which have the chunks of both sequences.
    "vector": Problem(18, "decode", f16, 2, 32, 32, 1, 300, 40, 24, seq_lens=(300, 44)),
    "vector-short": Problem(22, "decode", f16, 2, 2, 2, 1, 600, 40, 24, seq_lens=(600, 300)),
    "prefill": PREFILL,
    "packed": PACKED,
    "packed-int8": replace(PACKED, kv_format="int8", window_left=20),
    "varlen": replace(
        PACKED, op="varlen_prefill", q_lens=(50, 1, 9, 20), seq_lens=(113, 65, 0, 37), block_size=0
    ),
    # Several tiles of rows over more columns of cells than a simdgroup looks up at once.
    "map": Problem(
        *(0, "prefill", f16, 2, 2, 1, 150, 420, 16, 16),
        mask=torch.bool,
        mask_pattern="patches",
        mask_map=True,
        causality="bottom_right",
    ),
    "tiles": replace(PREFILL, kv_len=100, head_dim=136, value_dim=200, sinks=True),
    "tiles-int8": replace(PACKED, kv_format="int8", window_left=20, head_dim=136, value_dim=24),
    # Two groups of rows.
    "groups": Problem(2, "prefill", f32, 1, 1, 1, 20, 75, 136, 24, causality="bottom_right"),
    # Two simdgroups for a key fragment.
    "sums": Problem(1, "prefill", f16, 1, 1, 1, 20, 70, 280, 264),
}


@cache
def trial(name: str) -> Trial:
    if name in PROBLEMS:
        return of_problem(PROBLEMS[name])
    two_heads = replace(PROBLEMS["decode-split"], q_heads=6, kv_heads=2)
    return {
        "decode, sliced": partial(of_problem, two_heads, change="cut"),
        "sums, early loads": partial(of_problem, PROBLEMS["sums"], Device(9)),
        "merge": partial(of_merge, f32, 9, 200),
        "logits": partial(of_logits, LogitsProblem(7, "softmax", f16, (6, 1300), "offset", 5.0)),
        "mask_map": partial(of_map, f32, 2, 3, 100, 600),
        "write": partial(of_write, WriteProblem(1, "float", bf16, 11, 3, 192, 64, 3, 5)),
    }[name]()


TRIALS = (*PROBLEMS, "decode, sliced", "sums, early loads", "merge", "logits", "mask_map", "write")


@pytest.mark.parametrize("name", TRIALS)
def test_without_a_fault_all_is_silent_and_right(name: str) -> None:
    trial(name).run()


BARRIERS = [
    mutant
    for mutant in all_mutants()
    if "threadgroup_barrier(" in mutant.key.line and "threadgroup_barrier(" not in mutant.key.becomes
]


@pytest.mark.rotating
@pytest.mark.parametrize("mutant", BARRIERS, ids=lambda mutant: f"{mutant.key.file}:{mutant.first_line}")
def test_a_missing_barrier_is_reported(mutant: Mutant) -> None:
    found = judge(mutant, itertools.chain(map(trial, TRIALS), all_trials()))
    assert found.by == "report" and re.search("race|uninit|divergence", found.words), found
    assert re.search(r"\w\.(metal|h):\d+", found.words), "the report names the line"


SCALES = "scales.put_value(lane, value_scale);\n  }"
WEIGHT = "(lanes)[at.lane] = weight;"
SIMDGROUP_BARRIER = "simdgroup_barrier(mem_flags::mem_threadgroup);"
# A trial, a file, what becomes what there, and words of the verdict.
# fmt: off
FAULTS = {
    "next_key_head": ("decode", "decode_rows.h", "key.first = kv_head * params",
        "key.first = (kv_head + 1) * params", "bounds"),
    "scales_are_read_before_all_are_there": ("decode-int8", "decode_step.h",
        f"{SCALES}\n  {SIMDGROUP_BARRIER}", SCALES, "race"),
    "forgets_a_maximum": ("decode-split", "decode.metal", "at.pair == 0) {\n      row_max[row]",
        "at.pair == 0 && at.row != 1) {\n      row_max[row]", "uninit"),
    "reads_past_the_last_wide_column": ("wide-full", "columns.h", "kEven || column < kTo",
        "kEven || column <= kTo", "bounds"),
    "sums_are_read_before_all_are_put": ("vector-short", "chunk_sum.h",
        f"{SIMDGROUP_BARRIER}  // the sums", "// the sums", "race"),
    "reads_past_the_length": ("vector-full", "keys.h", "return key < length && (!fc_window",
        "return key <= length && (!fc_window", "bounds"),
    "weights_are_read_before_all_are_there": ("vector", "vector_step.h",
        f"{WEIGHT}\n    {SIMDGROUP_BARRIER}", WEIGHT, "race|uninit"),
    "stages_a_key_too_many": ("prefill", "keys.h", "min(key, length - 1)", "min(key, length)", "bounds"),
    "all_heads_write_one": ("prefill", "prefill_rows.h", "(tile.batch * heads + at.head) * params.q_len",
        "tile.batch * heads * params.q_len", "race"),
    "reads_scales_of_keys_that_are_not_there": ("packed-int8", "staging.h",
        "const bool read = kWhole || place.exists;", "const bool read = true;", "bounds"),
    "stages_the_next_sequence": ("varlen", "staging.h", "kWhole ? key : table.held(key)",
        "kWhole ? key : table.held(key) + 8", "bounds"),
    "cells_behind_the_last_row": ("map", "mapped_steps.h",
        "min(rows.tile.begin / kCellRows + thread_index, (rows.tile.end - 1) / kCellRows)",
        "rows.tile.begin / kCellRows + thread_index", "bounds"),
    "groups_share_products": ("groups", "prefill_wide.metal",
        "(place * kRowGroups + row_group) * kGroupScores", "(place * kRowGroups + 0) * kGroupScores", "race"),
    "stores_rows_that_do_not_exist": ("tiles", "results.h", "place < 0", "place < -1", "bounds"),
    "writes_a_cell_behind_the_last": ("mask_map", "mask_map.metal", "key_cell >= params.key_cells",
        "key_cell > params.key_cells", "race|bounds"),
    "writes_a_slot_too_many": ("write", "cache.metal", "slot >= params.slots", "slot > params.slots",
        "bounds"),
    "slices_begin_with_the_first_threadgroup": ("decode, sliced", "grid.h",
        "? slice.first_group + group :", "? slice.first_group :", "race|uninit|NaN|error"),
}
# fmt: on


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name: str) -> None:
    on, file, old, new, words = FAULTS[name]
    verdict = judge(changed(file, old, new), [trial(on)])
    assert re.search(words, verdict.words, re.IGNORECASE), verdict


@pytest.mark.parametrize("operand", ["query", "key_cache", "value_cache"])
def test_a_dropped_storage_offset_is_found(operand: str) -> None:
    """The start of a storage is not the start of the view: the NaN before it gives the fault away."""
    case = problems.build(replace(PROBLEMS["decode-paged"], layouts=("padded_rows",) * 3))
    assert_close(case, *direct_launch.run(case))
    with pytest.raises(AssertionError):
        assert_close(case, *direct_launch.run(case, drop_offset_of=operand, checks=""))
