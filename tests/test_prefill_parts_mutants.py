"""Seeded faults in how prefill cuts its keys into parts, in their merge, and in tiles of several heads."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tests import direct_launch
from tests.accuracy import assert_close
from tests.conftest import needs_emulator
from tests.test_prefill_parts import cut_case, packed_in_parts, run_cut, same

pytestmark = needs_emulator


@dataclass(frozen=True)
class Fault:
    name: str
    case: str  # of test_prefill_parts.FORCED, which are its controls
    old: str
    new: str
    source: str = "prefill.metal"


EMPTY = "put_empty_part(rows, params, part, partial_lse, thread_index);"
FAULTS = [
    Fault(
        "part_off_by_one", "dense", "const int first = part * size;", "const int first = (part + 1) * size;"
    ),
    Fault("last_step_dropped", "dense", "steps[first + size] * unit", "steps[first + size - 1] * unit"),
    Fault(
        "first_step_of_the_next_part", "dense", "steps[first + size] * unit", "steps[first + size + 1] * unit"
    ),
    Fault("whole_steps_of_the_next_part", "dense", "ranges.all_end = min(ranges.all_end, ranges.end);", ""),
    Fault("gap_is_counted", "paged_int8", "return steps[first] * unit;", "return first * unit;"),
    Fault(
        "parts_of_other_sizes",
        "paged",
        "params.parts - 1) / params.parts",
        "params.parts) / (params.parts + 1)",
    ),
    Fault("sink_in_every_part", "paged", "fc_sinks && part == 0 &&", "fc_sinks &&"),
    Fault(
        "sink_in_every_part_of_columns",
        "paged_wide",
        "fc_sinks && part == 0 &&",
        "fc_sinks &&",
        "prefill_wide.metal",
    ),
    Fault("empty_part_counts", "top_left", ".lse] = -INFINITY;", ".lse] = 0.0f;"),
    Fault("empty_part_is_not_written", "top_left", EMPTY, ""),
    Fault(
        "first_part_without_keys_is_empty",
        "varlen",
        "part > 0 && first_key >= ranges.end",
        "first_key >= ranges.end",
    ),
    Fault("parts_in_one_place", "dense", "place.lse += part * (", "place.lse += 0 * ("),
    Fault(
        "parts_of_rows_in_one_place", "dense", "place.out = place.lse * kValueDim;", "place.out = place.lse;"
    ),
    Fault(
        "merge_takes_parts_backwards",
        "dense",
        "parts.values(first + i",
        "parts.values(parts.count - 1 - first - i",
        "merge.metal",
    ),
    Fault("merge_leaves_out_the_last", "dense", "int(lane) + 1 : 0", "int(lane) : 0", "merge.metal"),
    Fault(
        "merge_out_by_heads",
        "paged",
        "long(out_row(group, params.span.q_len, uint(params.rows_per_sequence)))",
        "row",
        "merge.metal",
    ),
    Fault(
        "keys_of_the_first_head",
        "two_groups",
        "found.kv_head = fc_grouped ? head :",
        "found.kv_head = fc_grouped ? head * 0 :",
    ),
    Fault(
        "heads_of_the_first_group", "two_groups", "fc_grouped ? head * uint(params.group_size) : head", "head"
    ),
    Fault(
        "pairs_end_with_the_rows",
        "two_groups",
        "fc_grouped ? params.q_len * params.group_size",
        "fc_grouped ? params.q_len",
    ),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_fault_is_caught(fault: Fault) -> None:
    original = direct_launch.kernel_text(fault.source)
    assert fault.old in original, "the fault has gone out of date"

    def mutate(text: str) -> str:
        return text.replace(fault.old, fault.new) if text == original else text

    from softmetal.testing import KernelError

    with pytest.raises((AssertionError, KernelError)):
        assert_close(cut_case(fault.case)[0], *run_cut(fault.case, mutate))


def test_parts_that_go_by_the_capacity_are_noticed() -> None:
    """Right by any tolerance, but in other bits where there is room for more keys."""
    old, new = "params.parts, params.least_part)", "params.parts, 1)"
    assert old in direct_launch.kernel_text("prefill.metal")
    found = [packed_in_parts(parts, 4, lambda text: text.replace(old, new)) for parts in (3, 40)]
    assert not same(found[0], found[1])
