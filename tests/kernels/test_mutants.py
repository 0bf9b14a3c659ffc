"""The emulator's checks find seeded faults in every kernel, and the same launches without a fault are silent.

Each mutant changes one place of a kernel's text, and a check for races, bounds or uninitialised reads reports
it. tests/mutation has the faults that change a result or a count.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch

import torch_fattn
from tests.conftest import needs_emulator
from tests.helpers import direct_launch, problems
from tests.helpers.accuracy import assert_close
from tests.helpers.cache_problems import WriteProblem
from tests.helpers.logits_problems import LogitsProblem
from tests.helpers.problems import Problem
from tests.mutation.trials import Trial, of_logits, of_map, of_write

pytestmark = needs_emulator

f32, f16, bf16 = problems.DTYPES
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup)"
ORDERS = ("forward", "reverse", "random:3")  # of the threads

# 18 packed rows: two fragments and a second threadgroup of rows.
DECODE = Problem(1, "decode", f32, 2, 9, 1, 2, 75, 40, 24, seq_lens=(75, 44))
# More parts than simdgroups; values that take two rounds.
SPLIT = Problem(2, "decode", f16, 1, 3, 1, 1, 1400, 112, 72, seq_lens=(1400,))
# Up to four chunks in one launch.
SHORT = Problem(21, "decode", f16, 6, 3, 1, 1, 256, 112, 72, seq_lens=(256, 250, 0, 1, 200, 44))
SHORT_VECTOR = Problem(22, "decode", f16, 2, 2, 2, 1, 600, 40, 24, seq_lens=(600, 300))
# Full to the last slot, and ragged against the kernel's step: one key too many is outside the cache.
FULL = replace(DECODE, index=4, batch=1, seq_lens=(75,))
INT8 = Problem(11, "decode", f16, 1, 3, 1, 1, 75, 64, 32, seq_lens=(70,), kv_format="int8")
# 15 packed rows of wide heads that do not divide evenly; a full cache, and columns in chunks of 16 bytes.
WIDE = Problem(16, "decode", f16, 1, 5, 1, 3, 75, 136, 200, seq_lens=(69,), sinks=True)
FULL_WIDE = Problem(17, "decode", f32, 1, 3, 1, 1, 16, 136, 200, seq_lens=(16,))
WIDE_INT8 = replace(WIDE, kv_format="int8")
# One row for each of as many heads as threadgroups, which have the chunks of both sequences; a full cache.
VECTOR = Problem(18, "decode", f16, 2, 32, 32, 1, 300, 40, 24, seq_lens=(300, 44))
FULL_VECTOR = Problem(19, "decode", f32, 1, 2, 1, 1, 75, 40, 24, seq_lens=(75,))
PAGED_VECTOR = Problem(20, "paged_decode", f16, 2, 2, 1, 1, 96, 80, 40, seq_lens=(96, 41), block_size=12)
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
PACKED_INT8 = replace(PACKED, kv_format="int8", window_left=20)
VARLEN = replace(PACKED, op="varlen_prefill", q_lens=(50, 1, 9, 20), seq_lens=(113, 65, 0, 37), block_size=0)
# Several tiles of rows over more columns of cells than a simdgroup looks up at once.
MAPPED = Problem(
    *(0, "prefill", f16, 2, 2, 1, 150, 420, 16, 16),
    mask=torch.bool,
    mask_broadcast=(False, False, False, False),
    mask_pattern="patches",
    mask_map=True,
    causality="bottom_right",
)
# prefill_wide: columns that do not divide evenly, two simdgroups for a key fragment, two groups of rows.
TILES = Problem(0, "prefill", f16, 1, 2, 1, 43, 100, 136, 200, causality="bottom_right", sinks=True)
SUMS = Problem(1, "prefill", f16, 1, 1, 1, 20, 70, 280, 264)
GROUPS = Problem(2, "prefill", f32, 1, 1, 1, 20, 75, 136, 24, causality="bottom_right")
TILES_INT8 = replace(
    PACKED_INT8, index=3, q_len=20, kv_len=80, head_dim=136, value_dim=24, q_lens=(20, 1, 0, 7),
    seq_lens=(75, 65, 9, 7),
)  # fmt: skip
CONTROLS = (
    *(DECODE, SPLIT, FULL, INT8, WIDE, FULL_WIDE, WIDE_INT8, PREFILL, PACKED, PACKED_INT8, VARLEN, MAPPED),
    *(TILES, SUMS, GROUPS, TILES_INT8, VECTOR, FULL_VECTOR, PAGED_VECTOR, SHORT, SHORT_VECTOR),
)
VIEWS = ("padded_rows", "padded_rows", "padded_rows")  # views that start 8 elements into their storage


@dataclass(frozen=True)
class Mutant:
    name: str
    on: Problem | Trial
    kernel: str
    old: str
    new: str
    finding: str  # words of the report
    nth: int = 0

    def apply(self, text: str) -> str:
        pieces = text.split(self.old)
        if len(pieces) <= self.nth + 1:  # not an AssertionError, which would count as caught
            raise LookupError(f"{self.kernel} has no occurrence {self.nth} of {self.old!r}")
        head, tail = pieces[: self.nth + 1], pieces[self.nth + 1 :]
        return self.old.join(head) + self.new + self.old.join(tail)

    def run(self) -> None:
        if isinstance(self.on, Trial):
            self.on.run(self.apply)
        else:
            direct_launch.run(problems.build(self.on), {self.kernel: self.apply})


def removed_barriers(source: str, on: Problem | Trial, kernel: str = "") -> list[Mutant]:
    """Each barrier of a source."""
    kernel = kernel or f"fattn_{source}"
    return [
        Mutant(f"{source}_without_barrier_{nth}", on, kernel, BARRIER, "(void)0", "race", nth)
        for nth in range(direct_launch.kernel_text(source).count(BARRIER))
    ]


def of_kernel(kernel: str) -> Callable[..., Mutant]:
    return lambda name, on, old, new, finding: Mutant(
        f"{kernel}_{name}", on, f"fattn_{kernel}", old, new, finding
    )


decode, wide, vector = map(of_kernel, ("decode", "decode_wide", "decode_vector"))
prefill, tiles = map(of_kernel, ("prefill", "prefill_wide"))
MAP = of_map(f32, 2, 3, 100, 600)
ROWS = of_logits(LogitsProblem(7, "softmax", f16, (6, 1300), "offset", 5.0))
WRITE = of_write(WriteProblem(0, "float", bf16, 11, 3, 192, 64, 3, 5))
PUT = "scales.put_value(lane, value_scale);\n  }"
PUT_WEIGHT = "(lanes)[at.lane] = weight;"
# fmt: off
MUTANTS = [
    # In their order: the ends of chunks, then one launch, then two.
    *removed_barriers("decode", SPLIT)[:2],
    *removed_barriers("decode", SHORT)[2:6],
    *removed_barriers("decode", SPLIT)[6:],
    decode("next_key_head", DECODE, "key.first = kv_head * params", "key.first = (kv_head + 1) * params",
        "bounds"),
    decode("scales_are_read_before_all_are_there", INT8,
        f"{PUT}\n  simdgroup_barrier(mem_flags::mem_threadgroup);", PUT, "race"),
    decode("forgets_a_maximum", SPLIT, "at.pair == 0) {\n      row_max[row]",
        "at.pair == 0 && at.row != 1) {\n      row_max[row]", "uninit"),
    Mutant("merge_reads_a_part_too_many", SPLIT, "fattn_merge", "own_part < parts.count ?",
        "own_part <= parts.count ?", "bounds"),
    *removed_barriers("decode_wide", WIDE),
    wide("reads_past_the_last_column", FULL_WIDE, "kEven || column < kTo", "kEven || column <= kTo",
        "bounds"),
    wide("scales_overtake_the_step_before", WIDE_INT8,
        "    scales.put_key(thread_index, sequence.key.row_scale(",
        "    scales.put_value(thread_index, value_scale);\n"
        "    scales.put_key(thread_index, sequence.key.row_scale(", "race"),
    *removed_barriers("decode_vector", SHORT_VECTOR)[:3],
    *removed_barriers("decode_vector", VECTOR)[3:],
    vector("sums_are_read_before_all_are_put", SHORT_VECTOR,
        "simdgroup_barrier(mem_flags::mem_threadgroup);  // the sums", "// the sums", "race"),
    vector("reads_past_the_length", FULL_VECTOR, "return key < length && (!fc_window",
        "return key <= length && (!fc_window", "bounds"),
    vector("reads_past_the_last_column", FULL_VECTOR, "min(column, kDim - kChunk)", "column", "bounds"),
    vector("weights_are_read_before_all_are_there", VECTOR,
        f"{PUT_WEIGHT}\n    simdgroup_barrier(mem_flags::mem_threadgroup);", PUT_WEIGHT, "race"),
    vector("weights_overtake_the_step_before", VECTOR,
        "simdgroup_barrier(mem_flags::mem_threadgroup);  // the previous weights", "// the previous weights",
        "race"),
    vector("keeps_a_column_too_many", VECTOR, "if (column < kValueDim) {", "if (column <= kValueDim) {",
        "race|bounds"),
    vector("forgets_a_maximum", VECTOR, "if (at.saved.pair == 0) {\n      row_max[",
        "if (at.saved.pair == 0 && simdgroup_index != 1) {\n      row_max[", "uninit"),
    # The last precedes the look-up in the block table; the others enclose a step.
    *removed_barriers("prefill", PREFILL)[:-1],
    *removed_barriers("prefill", PACKED)[-1:],
    prefill("stages_a_key_too_many", PREFILL, "min(key, length - 1)", "min(key, length)", "bounds"),
    prefill("key_of_the_query_head", PREFILL,
        "found.kv_head = fc_grouped ? head : head / uint(params.group_size);", "found.kv_head = head;",
        "bounds"),
    prefill("all_heads_write_one", PREFILL, "(tile.batch * heads + at.head) * params.q_len",
        "tile.batch * heads * params.q_len", "race"),
    prefill("reads_scales_of_keys_that_are_not_there", PACKED_INT8,
        "const bool read = kWhole || place.exists;", "const bool read = true;", "bounds"),
    prefill("stages_the_next_sequence", VARLEN,
        "kWhole ? key : table.held(key)", "kWhole ? key : table.held(key) + 8",
        "bounds"),
    prefill("spare_rows_see_keys", VARLEN, "if (batch >= 0) {", "if (batch >= -1) {", "bounds"),
    prefill("cells_behind_the_last_row", MAPPED,
        "min(rows.tile.begin / kCellRows + thread_index, (rows.tile.end - 1) / kCellRows)",
        "rows.tile.begin / kCellRows + thread_index", "bounds"),
    *removed_barriers("prefill_wide", TILES),
    tiles("scales_have_one_place", TILES_INT8, "shared_scales + place * kTileKeys",
        "shared_scales + 0 * kTileKeys", "race"),
    tiles("groups_share_products", GROUPS, "(place * kRowGroups + row_group) * kGroupScores",
        "(place * kRowGroups + 0) * kGroupScores", "race"),
    tiles("all_simdgroups_make_the_first_products", TILES, "share / kSumShares * kOwnFragments + own", "own",
        "race|uninit"),
    tiles("all_shares_are_the_first", SUMS, "share % kSumShares, totals[r]", "0, totals[r]", "race"),
    tiles("query_of_the_first_group", GROUPS, "row_group * (kGroupPieces", "0 * (kGroupPieces", "race"),
    tiles("stores_rows_that_do_not_exist", TILES, "place < 0", "place < -1", "bounds"),
    Mutant("mask_map_cell_behind_the_last", MAP, "fattn_mask_map", "key_cell >= params.key_cells",
        "key_cell > params.key_cells", "race|bounds"),
    *removed_barriers("logits", ROWS, "fattn_softmax"),
    Mutant("cache_write_a_slot_too_many", WRITE, "fattn_cache_write", "slot >= params.slots",
        "slot > params.slots", "bounds"),
]
# fmt: on


@pytest.mark.parametrize("problem", CONTROLS, ids=str)
@pytest.mark.parametrize("order", ORDERS)
def test_the_controls_are_silent_and_right(problem: Problem, order: str) -> None:
    case = problems.build(problem)
    assert_close(case, *direct_launch.run(case, order=order))


@pytest.mark.parametrize("trial", [MAP, ROWS, WRITE], ids=lambda trial: trial.name)
def test_the_trials_are_silent_and_right(trial: Trial) -> None:
    trial.run()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_mutant_is_reported(mutant: Mutant) -> None:
    from softmetal.testing import KernelError

    with pytest.raises(KernelError, match=f"(?i){mutant.finding}") as caught:
        mutant.run()
    assert mutant.kernel in str(caught.value)
    assert re.search(r"\w\.(metal|h):\d+", str(caught.value)), "the report names the line"


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


@pytest.mark.parametrize("problem", [SUMS, replace(TILES_INT8, head_dim=264)], ids=str)
def test_early_loads(problem: Problem) -> None:
    """The plan for GPUs newer than that of the other tests."""
    case = problems.build(problem)
    plan = torch_fattn.explain(problem.op, **case.arguments("cpu")[0], family=9, cores=8).data
    assert plan["passes"][0]["macros"]["FATTN_EARLY_LOADS"] == "true"
    assert_close(case, *direct_launch.run(case, plan=plan))
