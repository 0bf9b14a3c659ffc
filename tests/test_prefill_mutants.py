"""Seeded faults in prefill, dense and packed: as in test_mutants.py."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests import problems
from tests.conftest import needs_emulator
from tests.mutants import ORDERS, Mutant, assert_caught, assert_silent_and_right, removed_barriers
from tests.problems import Problem

pytestmark = needs_emulator

f32, f16, bf16 = problems.DTYPES

# Whole and ragged steps, several of each, and a ragged last tile of rows.
PREFILL = Problem(0, "prefill", f16, 1, 2, 1, 43, 150, 64, 40, causality="bottom_right")
# Windows with sink tokens: whole steps in both ranges and a gap between them; and one to the right.
PREFILL_WINDOW = Problem(
    11,
    "prefill",
    f16,
    1,
    2,
    1,
    20,
    300,
    40,
    24,
    causality="bottom_right",
    window_left=70,
    sink_tokens=40,
    sinks=True,
)
PREFILL_RIGHT = Problem(12, "prefill", f32, 1, 2, 1, 40, 90, 40, 24, window_left=9, window_right=11)
# A chunk of a prompt, a token, a sequence without rows, a ragged one; blocks that end within a step.
PACKED = Problem(
    13,
    "paged_prefill",
    f16,
    4,
    6,
    2,
    50,
    128,
    40,
    24,
    causality="bottom_right",
    q_lens=(50, 1, 0, 7),
    seq_lens=(113, 65, 9, 7),
    block_size=16,
    spare_rows=2,
)
# The scales of keys below the window are NaN, and some of them are in its first step.
PACKED_INT8 = replace(PACKED, kv_format="int8", window_left=20)
PACKED_INT4 = replace(PACKED, kv_format="int4", head_dim=64, value_dim=32)
# Keys of the neighbours on both sides, a sequence without any, and rows behind the last; two heads to a tile.
VARLEN = replace(
    PACKED,
    op="varlen_prefill",
    q_lens=(50, 1, 9, 20),
    seq_lens=(113, 65, 0, 37),
    block_size=0,
)
# Rows from the same position on in each sequence.
VARLEN_OFFSET = replace(VARLEN, causality="offset", q_offset=11, alibi_slopes=True)
CONTROLS = (
    *(PREFILL, PREFILL_WINDOW, PREFILL_RIGHT, PACKED, PACKED_INT8, PACKED_INT4),
    *(VARLEN, VARLEN_OFFSET),
)

MUTANTS = [
    # The first is before entries of the block table are looked up; the others around a step.
    *removed_barriers("prefill", PACKED)[:1],
    *removed_barriers("prefill", PREFILL)[1:],
    Mutant(
        "prefill_stages_a_key_too_many",
        PREFILL,
        "fattn_prefill",
        "params.kv_len) - first_key;",
        "params.kv_len) - first_key + 1;",
        "bounds",
    ),
    Mutant(
        "prefill_stores_a_row_too_many",
        PREFILL,
        "fattn_prefill",
        "at.exists = item < end;",
        "at.exists = item <= end;",
        "bounds",
    ),
    Mutant(
        "prefill_sees_the_next_key",
        PREFILL,
        "fattn_prefill",
        "fc_causal ? clamp(position + 1, 0, length)",
        "fc_causal ? clamp(position + 2, 0, length)",
    ),
    Mutant(
        "prefill_takes_the_diagonal_as_whole",
        PREFILL,
        "fattn_prefill",
        "ranges.all_end = first.end;",
        "ranges.all_end = last.end;",
    ),
    Mutant(
        "prefill_takes_a_ragged_step_as_whole",
        PREFILL,
        "fattn_prefill",
        "ranges.all_end - ranges.all_end % unit;",
        "(ranges.all_end + unit - 1) / unit * unit;",
    ),
    Mutant(
        "prefill_window_begins_late",
        PREFILL_WINDOW,
        "fattn_prefill",
        "-long(params.window_left)",
        "1 - long(params.window_left)",
    ),
    Mutant(
        "prefill_window_begins_early",
        PREFILL_WINDOW,
        "fattn_prefill",
        "-long(params.window_left)",
        "-1 - long(params.window_left)",
    ),
    Mutant(
        "prefill_window_ends_late",
        PREFILL_RIGHT,
        "fattn_prefill",
        "long(params.window_right) + 1",
        "long(params.window_right) + 2",
    ),
    Mutant(
        "prefill_window_is_that_of_the_last_row",
        PREFILL_WINDOW,
        "fattn_prefill",
        "ranges.begin = apart ? first.begin : 0;",
        "ranges.begin = apart ? last.begin : 0;",
    ),
    Mutant(
        "prefill_takes_the_windows_first_step_as_whole",
        PREFILL_WINDOW,
        "fattn_prefill",
        "ranges.all_begin = last.begin;",
        "ranges.all_begin = first.begin;",
    ),
    Mutant(
        "prefill_takes_more_sink_tokens_as_whole",
        PREFILL_WINDOW,
        "fattn_prefill",
        "ranges.all_sink_end - ranges.all_sink_end % unit;",
        "(ranges.all_sink_end + unit - 1) / unit * unit;",
    ),
    Mutant(
        "prefill_jumps_over_the_windows_first_step",
        PREFILL_WINDOW,
        "fattn_prefill",
        "ranges.begin / unit * unit",
        "(ranges.begin / unit + 1) * unit",
    ),
    Mutant(
        "prefill_leaves_sink_tokens_early",
        PREFILL_WINDOW,
        "fattn_prefill",
        "next >= ranges.sink_end &&",
        "next >= ranges.sink_end - 8 &&",
    ),
    Mutant(
        "prefill_skips_a_step_of_a_simdgroup",
        PREFILL_WINDOW,
        "fattn_prefill",
        "to > begin || from < sink_end",
        "to > begin + 32 || from < sink_end",
    ),
    Mutant(
        "prefill_sink_counts_in_every_lane",
        PREFILL_WINDOW,
        "fattn_prefill",
        "sink_of(row, params, sinks), at.pair == 0",
        "sink_of(row, params, sinks), true",
    ),
    Mutant(
        "prefill_key_of_the_query_head",
        PREFILL,
        "fattn_prefill",
        "found.kv_head = fc_grouped ? head : head / uint(params.group_size);",
        "found.kv_head = head;",
        "bounds",
    ),
    Mutant(
        "prefill_all_heads_write_one",
        PREFILL,
        "fattn_prefill",
        "(tile.batch * heads + at.head) * params.q_len",
        "tile.batch * heads * params.q_len",
        "race",
    ),
    # Packed rows and their blocks.
    Mutant(
        "packed_sequences_end_a_row_late",
        PACKED,
        "fattn_prefill",
        "clamp(cu_seqlens[(sequence + 1) * params.cu_seqlens_stride], 0,",
        "clamp(cu_seqlens[(sequence + 1) * params.cu_seqlens_stride] + 1, 0,",
    ),
    Mutant(
        "packed_reads_an_end_too_many",
        PACKED,
        "fattn_prefill",
        "if (sequence < params.batch) {",
        "if (sequence <= params.batch) {",
        "bounds",
    ),
    Mutant(
        "packed_takes_the_table_of_the_next",
        PACKED,
        "fattn_prefill",
        "max(tile.batch, 0L) * params.block_table_batch_stride",
        "min(tile.batch + 1, 3L) * params.block_table_batch_stride",
    ),
    Mutant(
        "packed_length_of_the_first",
        PACKED,
        "fattn_prefill",
        "seq_lens[tile.batch * params.seq_lens_stride]",
        "seq_lens[0]",
    ),
    Mutant(
        "packed_positions_of_a_dense_call",
        PACKED,
        "fattn_prefill",
        "first_position = length - tile.q_len;",
        "first_position = length - params.q_len;",
    ),
    Mutant(
        "packed_query_of_the_first_head",
        PACKED,
        "fattn_prefill",
        "query + at.head * params.query.head",
        "query + tile.head * params.query.head",
    ),
    Mutant(
        "packed_tiles_begin_anew",
        PACKED,
        "fattn_prefill",
        "(tile - simd_shuffle(through - tiles, owner)) * kTileRows",
        "0",
    ),
    Mutant(
        "packed_wrong_block_for_the_last_key",
        PACKED,
        "fattn_prefill",
        "uint(key) / fc_block_size",
        "uint(min(key, length - 2)) / fc_block_size",
    ),
    Mutant(
        "packed_key_of_the_next_slot",
        PACKED,
        "fattn_prefill",
        "place_of(first_key + i,",
        "place_of(first_key + i + 1,",
    ),
    # Quantised pools.
    Mutant(
        "packed_scale_of_the_next_key",
        PACKED_INT8,
        "fattn_prefill",
        "put_key(thread_index, key_scale)",
        "put_key(thread_index ^ 1, key_scale)",
    ),
    Mutant(
        "packed_values_by_the_scales_of_keys",
        PACKED_INT8,
        "fattn_prefill",
        "*source.value.scales_at(place, params.value_scales)",
        "*source.key.scales_at(place, params.key_scales)",
    ),
    Mutant(
        "packed_scales_of_the_first_head",
        PACKED_INT8,
        "fattn_prefill",
        "source.value.head = uint(tile.kv_head);",
        "source.value.head = 0;",
    ),
    Mutant(
        "packed_scale_of_another_slot",
        PACKED_INT8,
        "fattn_prefill",
        "place_of(first_key + lane % kTileKeys, block)",
        "place_of(first_key + (lane ^ 3) % kTileKeys, block)",
    ),
    Mutant(
        "packed_reads_scales_of_keys_that_are_not_there",
        PACKED_INT8,
        "fattn_prefill",
        "const bool read = kWhole || place.exists;",
        "const bool read = true;",
        "bounds",
    ),
    Mutant(
        "packed_hidden_scale_counts",
        PACKED_INT8,
        "fattn_prefill",
        "const bool sees_second = !kHidden ||",
        "const bool sees_second = true ||",
    ),
    Mutant(
        "packed_keys_are_not_scaled",
        PACKED_INT8,
        "fattn_prefill",
        "  scale_products(attention, tiles.scales, at);",
        "",
    ),
    Mutant(
        "packed_groups_of_the_first_columns",
        PACKED_INT4,
        "fattn_prefill",
        "column / kInt4Group * 2",
        "0",
    ),
    Mutant(
        "packed_tile_of_even_columns",
        PACKED_INT4,
        "fattn_prefill",
        "const int at = i + w * kTileChunk / 4;",
        "const int at = (i + w * kTileChunk / 4) & ~1;",
    ),
    Mutant(
        "packed_lse_by_rows",
        PACKED,
        "fattn_prefill",
        "place.lse = at.head * params.q_len + tile.first_row + at.row",
        "place.lse = (tile.first_row + at.row) * heads + at.head",
    ),
    Mutant(
        "varlen_sees_the_next_sequence",
        VARLEN,
        "fattn_prefill",
        "keys.count = min(end - first, params.kv_len);",
        "keys.count = min(end - first + 1, params.kv_len);",
    ),
    Mutant(
        "varlen_sees_all_that_follows",
        replace(VARLEN, causality="none"),
        "fattn_prefill",
        "keys.count = min(end - first, params.kv_len);",
        "keys.count = min(params.kv_rows - first, params.kv_len);",
    ),
    Mutant(
        "varlen_begins_a_key_late", VARLEN, "fattn_prefill", "keys.first = first;", "keys.first = first + 1;"
    ),
    Mutant(
        "varlen_keys_of_the_first_sequence",
        VARLEN,
        "fattn_prefill",
        " + first_key * params.key.row;",
        ";",
    ),
    Mutant(
        "varlen_values_of_the_first_sequence",
        VARLEN,
        "fattn_prefill",
        " + first_key * params.value.row;",
        ";",
    ),
    Mutant(
        "varlen_starts_side_by_side",
        VARLEN,
        "fattn_prefill",
        "cu_seqlens_k[batch * params.cu_seqlens_k_stride]",
        "cu_seqlens_k[batch]",
    ),
    Mutant(
        "varlen_stages_the_next_sequence",
        VARLEN,
        "fattn_prefill",
        "(fc_packed_keys ? source.table.length : params.kv_len) - first_key;",
        "(fc_packed_keys ? params.kv_rows : params.kv_len) - first_key;",
        "bounds",
    ),
    Mutant(
        "varlen_rows_begin_together",
        VARLEN,
        "fattn_prefill",
        "params.last_rows_meet ? length - tile.q_len : params.q_offset",
        "params.q_offset",
    ),
    Mutant(
        "varlen_offset_is_dropped",
        VARLEN_OFFSET,
        "fattn_prefill",
        "params.last_rows_meet ? length - tile.q_len : params.q_offset",
        "length - tile.q_len",
    ),
    Mutant(
        "varlen_spare_rows_see_keys",
        VARLEN,
        "fattn_prefill",
        "if (batch >= 0) {",
        "if (batch >= -1) {",
        "bounds",
    ),
]


@pytest.mark.parametrize("problem", CONTROLS, ids=str)
@pytest.mark.parametrize("order", ORDERS)
def test_the_controls_are_silent_and_right(problem: Problem, order: str) -> None:
    assert_silent_and_right(problem, order)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_mutant_is_caught(mutant: Mutant) -> None:
    assert_caught(mutant)
