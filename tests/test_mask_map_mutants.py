"""Seeded faults in maps of masks and in what prefill makes of them: as in test_mutants.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import torch_fattn
from tests import direct_launch, problems
from tests.accuracy import assert_close
from tests.conftest import needs_emulator
from tests.mutants import ORDERS, Mutant, assert_caught, assert_silent_and_right
from tests.problems import Problem
from torch_fattn import reference

pytestmark = needs_emulator

f32, f16, bf16 = problems.DTYPES

# Several tiles of rows, ragged ones too, over more columns of cells than a simdgroup looks up at once.
ROWS16 = Problem(
    *(0, "prefill", f16, 2, 2, 1, 150, 420, 16, 16),
    mask=torch.bool,
    mask_broadcast=(False, False, False, False),
    mask_pattern="patches",
    mask_map=True,
    causality="bottom_right",
)
ROWS8 = replace(ROWS16, index=1, head_dim=96, value_dim=16, causality="none")
KEYS16 = replace(ROWS16, index=2, dtype=f32, head_dim=72, kv_len=200, mask=f32)
WINDOW = replace(ROWS16, index=3, q_len=70, kv_len=900, window_left=90, sink_tokens=40)
WIDE = replace(ROWS16, index=4, q_len=70, kv_len=200, head_dim=136, value_dim=40, mask=bf16)
# Keys that no row sees, and NaN in their place, beside others in a cell.
FEW_ROWS = replace(ROWS8, index=7, q_len=20, batch=1, q_heads=1)
CONTROLS = (ROWS16, ROWS8, KEYS16, WINDOW, WIDE, FEW_ROWS)


def mutant(name: str, problem: Problem, old: str, new: str, finding: str = "") -> Mutant:
    kernel = "fattn_prefill_wide" if problem.head_dim > 128 else "fattn_prefill"
    return Mutant(name, problem, kernel, old, new, finding)


OF_ROWS = "tile.begin / kCellRows + lane / kColumns"
OWN = "ushort((first_row - rows.tile.begin) / kCellRows)"
HIDDEN = "cell >> (kCellKindBits + before);"
MUTANTS = [
    mutant("cells_of_the_row_below", ROWS16, OF_ROWS, f"{OF_ROWS} + 1"),
    mutant("cells_of_the_first_row", ROWS16, OF_ROWS, "tile.begin / kCellRows"),
    mutant(
        "cells_behind_the_last_row",
        ROWS16,
        "min(rows.tile.begin / kCellRows + lane / kColumns, (rows.tile.end - 1) / kCellRows)",
        "rows.tile.begin / kCellRows + lane / kColumns",
        "bounds",
    ),
    mutant(
        "cells_of_the_next_column",
        ROWS16,
        "column * params.mask_map.key]",
        "(column + 1) * params.mask_map.key]",
        "",
    ),
    mutant("map_of_the_first_sequence", ROWS16, "rows.tile.batch * params.mask_map.batch", "0"),
    mutant("map_of_the_first_head", ROWS16, "rows.tile.head * params.mask_map.head", "0"),
    mutant(
        "map_of_the_key_head",
        ROWS16,
        "rows.tile.head * params.mask_map",
        "rows.tile.kv_head * params.mask_map",
    ),
    mutant("own_cell_of_the_tile", ROWS8, OWN, "ushort(0)"),
    mutant("own_cell_of_the_next", ROWS16, OWN, f"ushort({OWN} ^ 1)"),
    mutant("mixed_is_taken_as_whole", ROWS16, "(cell == kCellWhole) & own", "(cell != kHiddenCell) & own"),
    mutant(
        "the_diagonal_is_taken_as_whole",
        ROWS16,
        "(cell == kCellWhole) & own_ranges.all_see(first_key, first_key + 1)",
        "cell == kCellWhole",
    ),
    mutant(
        "whole_ends_with_the_last_row", ROWS16, "ranges.all_end = first.end;", "ranges.all_end = last.end;"
    ),
    mutant(
        "a_ragged_step_is_taken_as_whole",
        ROWS8,
        "ranges.all_end - ranges.all_end % unit;",
        "(ranges.all_end + unit - 1) / unit * unit;",
    ),
    mutant("mixed_is_taken_as_hidden", ROWS16, HIDDEN, "cell == kCellWhole ? 0 : ~0u;"),
    mutant("fragments_of_the_one_before", ROWS16, "+ before);", "+ before) << 1;"),
    mutant("fragments_of_the_one_behind", ROWS8, "+ before);", "+ before + 1);"),
    mutant("fragments_of_the_first_half", KEYS16, "+ before);", "+ 0);"),
    mutant("wide_fragments_of_the_one_before", WIDE, "+ before);", "+ before) << 1;"),
    mutant(
        "columns_end_early",
        ROWS16,
        "if (key < ranges.end && ranges.meet",
        "if (key + kCellKeys < ranges.end && ranges.meet",
    ),
    mutant("half_a_column_is_left_out", KEYS16, "column >= key / kCellKeys", "column > key / kCellKeys"),
    mutant(
        "looks_a_column_too_far_ahead", ROWS16, "first_column() + kColumns)", "first_column() + kColumns + 1)"
    ),
    mutant(
        "never_looks_again",
        ROWS16,
        "key = max(key, step_of(first_column() + kColumns));",
        "key = ranges.end;",
    ),
    mutant(
        "begins_a_column_late",
        ROWS16,
        "look_up(key / kCellKeys, rows, params, mask_map, lane);\n    return",
        "look_up(key / kCellKeys + 1, rows, params, mask_map, lane);\n    return",
    ),
    mutant(
        "steps_over_the_gap_too_far",
        WINDOW,
        "return max(key, step_of(seen));",
        "return max(key, step_of(seen) + kTileKeys);",
    ),
    mutant(
        "sink_tokens_are_left_out",
        WINDOW,
        "ranges.meet(key, key + kCellKeys)) {\n      // Where",
        "key >= ranges.begin) {\n      // Where",
    ),
    mutant("special_values_of_a_mixed_tile", FEW_ROWS, "== kCellWhole);\n  }", ">= kCellMixed);\n  }"),
    mutant("wide_mixed_is_taken_as_whole", WIDE, "cell == kCellWhole && keys", "cell != kHiddenCell && keys"),
    mutant(
        "wide_diagonal_is_taken_as_whole",
        WIDE,
        "cell == kCellWhole && keys.whole_at(first_key, places)",
        "cell == kCellWhole",
    ),
    mutant("wide_mixed_is_taken_as_hidden", WIDE, HIDDEN, "cell == kCellWhole ? 0 : ~0u;"),
    mutant("wide_cells_of_the_next_row", WIDE, OF_ROWS, f"{OF_ROWS} + 1"),
]


@pytest.mark.parametrize("problem", CONTROLS, ids=str)
@pytest.mark.parametrize("order", ORDERS)
def test_the_controls_are_silent_and_right(problem: Problem, order: str) -> None:
    assert_silent_and_right(problem, order)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_mutant_is_caught(mutant: Mutant) -> None:
    assert_caught(mutant)


# ---- of the pass that makes a map


def made(mask: torch.Tensor, old: str = "", new: str = "", slices: int = 0) -> torch.Tensor:
    """The map that the kernel makes, with a fault in its text, or in slices."""
    (step,) = torch_fattn.explain("mask_map", mask, family=7, cores=8).passes
    if slices:
        direct_launch.cut_into_slices(step, slices)
    text = direct_launch.kernel_text("mask_map")
    assert old in text
    cells = torch.full(torch.ops.fattn.mask_map(mask.to("meta")).shape, 255, dtype=torch.uint8)
    direct_launch.launch(step, {"attn_mask": mask, "mask_map": cells}, lambda text: text.replace(old, new, 1))
    return cells


def mask_of(dtype: torch.dtype) -> torch.Tensor:
    problem = Problem(9, "prefill", f16, 2, 3, 3, 100, 600, 8, 8, mask=dtype, mask_pattern="patches")
    mask = problems.build(problem).clean["attn_mask"]
    if dtype != torch.bool:
        mask[0, 0, :16, :32], mask[0, 0, 16:32, :32] = -5.0, 0.0
        mask[0, 0, 31, :32] = -torch.inf  # the last row of its cell
    return mask


@pytest.mark.parametrize("slices", [0, 1, 7])
@pytest.mark.parametrize("dtype", [torch.bool, f32, f16, bf16], ids=str)
def test_a_map_is_made_in_slices(dtype: torch.dtype, slices: int) -> None:
    mask = mask_of(dtype)
    assert torch.equal(made(mask, slices=slices).double(), reference.mask_map(mask))


MAP_MUTANTS: dict[str, tuple[Any, ...]] = {
    "a_row_less": ("r < kCellRows;", "r < kCellRows - 1;"),
    "a_row_late": ("map_row % params.row_cells * kCellRows;", "map_row % params.row_cells * kCellRows + 1;"),
    "a_key_late": ("key_cell * kCellKeys + lane;", "key_cell * kCellKeys + lane + 1;"),
    "cells_of_other_size": ("key_cell * kCellKeys + lane;", "key_cell * (kCellKeys / 2) + lane;"),
    "the_row_behind_the_last": (
        "first_row + r < params.rows &&",
        "first_row + r <= params.rows &&",
        "bounds",
    ),
    "the_key_behind_the_last": ("key < params.keys)", "key <= params.keys)", "bounds"),
    "the_cell_behind_the_last": (
        "key_cell >= params.key_cells",
        "key_cell > params.key_cells",
        "race|bounds",
    ),
    "hidden_in_one_lane": ("hidden = simd_all(hidden);", "hidden = simd_any(hidden);"),
    "whole_in_one_lane": ("whole = simd_all(whole);", "whole = simd_any(whole);"),
    "fragments_behind_the_last_key": ("hidden && key < params.keys ?", "hidden ?"),
    "fragments_of_16_keys": ("lane / kFragment)", "lane / 16)"),
    "fragments_that_are_seen": ("(~seen &", "(seen &"),
    "finite_is_whole": ("added == 0.0f", "added != -INFINITY"),
    "the_lowest_is_hidden": ("added == -INFINITY", "added < -3.0f"),
    "the_last_row_decides": ("hidden = hidden && added", "hidden = added"),
    "the_first_head": ("head % params.heads * params.mask.head", "0"),
    "the_first_sequence": ("head / params.heads * params.mask.batch", "0"),
    "cells_side_by_side_are_one": ("* kGroupCells + simdgroup_index", "* kGroupCells"),
}


@pytest.mark.parametrize("name", MAP_MUTANTS)
def test_a_fault_of_the_map_is_caught(name: str) -> None:
    from softmetal.testing import KernelError

    old, new, *finding = MAP_MUTANTS[name]
    mask = mask_of(f32)
    if finding:
        with pytest.raises(KernelError, match=f"(?i){finding[0]}"):
            made(mask, old, new)
        return
    assert not torch.equal(made(mask, old, new).double(), reference.mask_map(mask))


def test_a_stale_map_gives_itself_away() -> None:
    """The control of all that take a map: of another mask, the result is wrong."""
    case = problems.build(ROWS16)
    assert_close(case, *direct_launch.run(case, checks=""))
    other = reference.mask_map(case.clean["attn_mask"].flip(2)).to(torch.uint8)
    operand = case.operands["mask_map"]
    operand.of(operand.base).copy_(other)
    with pytest.raises(AssertionError):
        assert_close(case, *direct_launch.run(case, checks=""))
