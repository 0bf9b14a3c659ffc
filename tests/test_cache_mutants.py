"""Seeded faults in cache.metal are found, by the bits that it writes or by the emulator's checks; the same
launches without a fault are silent and right."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest
from torch import Tensor

import torch_fattn
from tests import cache_problems
from tests.cache_problems import WriteProblem, assert_written
from tests.conftest import needs_emulator
from tests.direct_launch import kernel_text

pytestmark = needs_emulator

f32, f16, bf16 = cache_problems.DTYPES
# A column pass and a half, rows of every kind, pools with gaps; 15 slots and tokens beyond them.
FLOAT = WriteProblem(0, "float", bf16, 11, 3, 192, 64, 3, 5, "padded", "padded", False)
INT8 = WriteProblem(1, "int8", f32, 23, 3, 192, 64, 3, 5, "padded", "padded", special=True)
FP8 = WriteProblem(2, "fp8_e4m3", f16, 23, 3, 96, 64, 3, 5, "hnd", "offset", special=True)
UNSCALED = WriteProblem(3, "fp8_unscaled", f16, 23, 3, 96, 64, 3, 5, "offset", "offset", special=True)
INT4 = WriteProblem(4, "int4", f32, 23, 3, 192, 96, 3, 5, "slot_gaps", "padded", special=True)
CONTROLS = (FLOAT, INT8, FP8, UNSCALED, INT4)


def launch(problem: WriteProblem, old: str = "", new: str = "") -> None:
    """Launches with the change of text, and raises for a finding or a wrong bit."""
    from softmetal.testing import Library

    case = cache_problems.build(problem)
    arguments, bases = case.arguments("cpu")
    (only,) = torch_fattn.explain("cache_write", **arguments, family=7, cores=8).passes
    text = kernel_text(only["source"])
    if old:
        assert text.count(old) == 1, f"{text.count(old)} occurrences of {old!r}"
        text = text.replace(old, new)
    bound: list[Tensor | bytes | None] = [None] * 25
    for name, slot in only["bindings"].items():
        bound[slot] = bytes.fromhex(only["params_bytes"]) if name == "params" else arguments[name]
    numbers = {name: int(n) for name, n in re.findall(r"(kConst\w+) = (\d+)", text)}
    indices = {"vector_loads": numbers["kConstVectorLoads"], "scales": numbers["kConstScales"]}
    constants = {indices[name]: value for name, value in only["constants"].items()}
    library = Library(text, defines=only["macros"], mode="checked")
    pipeline = library.pipeline(only["kernel"], constants)
    pipeline.run(bound, only["grid"], only["threads"], checks="race,bounds,uninit")
    assert_written(case, bases)


@pytest.mark.parametrize("problem", CONTROLS, ids=lambda p: p.kv_format)
def test_controls(problem: WriteProblem) -> None:
    launch(problem)


@dataclass(frozen=True)
class Mutant:
    name: str
    problem: WriteProblem
    old: str
    new: str


MUTANTS = [
    Mutant("a_slot_too_many", FLOAT, "slot >= params.slots", "slot > params.slots"),
    Mutant("negative_slots_are_written", FLOAT, "slot < 0 || ", ""),
    Mutant("a_row_too_many", FLOAT, "row >= params.rows", "row > params.rows"),
    Mutant("slot_of_the_pool", FLOAT, "slot - place.block * block_size", "slot"),
    Mutant("values_by_the_strides_of_keys", FLOAT, "params.value_head_stride", "params.key_head_stride"),
    Mutant(
        "a_pass_too_many",
        FLOAT,
        "column < kDim; column += kPassColumns",
        "column <= kDim; column += kPassColumns",
    ),
    Mutant("scale_of_the_wrong_head", INT8, "offset_of(place, head, params.key_scales)", "0"),
    Mutant("scale_of_a_lane", INT8, "simd_max(largest)", "largest"),
    Mutant("nan_that_only_its_lane_knows", INT8, "simd_all(finite)", "finite"),
    Mutant("128_of_int8", INT8, "kInt8Max = 127.0f", "kInt8Max = 128.0f"),
    Mutant("subnormal_scales", INT8, "fabs(x) < kSmallestNormal", "false"),
    Mutant("division_by_0", INT8, "scale > 0.0f ? q / scale : 0.0f", "q / scale"),
    Mutant("truncated_int8", INT8, "int(rint(q)) : e4m3_of(q)", "int(q) : e4m3_of(q)"),
    Mutant("truncated_fp8", FP8, "(bits + 0x7ffff + ((bits >> 20) & 1)) >> 20", "bits >> 20"),
    Mutant("fp8_ties_away", UNSCALED, "0x7ffff + ((bits >> 20) & 1)", "0x80000"),
    Mutant("fp8_without_sign", FP8, "code | 0x80", "code"),
    Mutant("minus_0", UNSCALED, "x < 0.0f && code != 0", "x < 0.0f"),
    Mutant("fp8_does_not_saturate", UNSCALED, "fmin(fabs(x), kFp8Max)", "fabs(x)"),
    Mutant("fp8_nan_saturates", UNSCALED, "if (isnan(x))", "if (false)"),
    Mutant("minimum_to_nearest", INT4, "= rounded_down(low)", "= half(low)"),
    Mutant("scale_to_nearest", INT4, "= rounded_up(flushed(", "= half(flushed("),
    Mutant("groups_of_16", INT4, "step < kGroupLanes", "step < kGroupLanes / 2"),
    Mutant("nibbles_swapped", INT4, "codes[0] | codes[1] << 4", "codes[1] | codes[0] << 4"),
    Mutant("half_overflows", INT4, "= clamp(row.x[pass][e], -kHalfMax, kHalfMax)", "= row.x[pass][e]"),
    Mutant("scales_of_one_group", INT4, "scales + column / kInt4Group * 2", "scales"),
    Mutant("bad_group_looks_good", INT4, "group[0] = bad ? Scale(NAN) : ", "group[0] = "),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_is_caught(mutant: Mutant) -> None:
    with pytest.raises((AssertionError, RuntimeError)) as caught:
        launch(mutant.problem, mutant.old, mutant.new)
    assert "occurrences" not in str(caught.value) and "error:" not in str(caught.value), str(caught.value)
