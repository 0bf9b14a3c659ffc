"""The definition of the quantised formats: an exact small model of each, the documented error bounds, and
what becomes of numbers that are not ordinary."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from tests.helpers.kv_formats import FORMS, QUANTISED, has_row_scales, known, name_of
from torch_fattn.operators.kv_formats import KV_FORMATS
from torch_fattn.reference import dequantise, quantise

pytestmark = pytest.mark.host_only

formats = pytest.mark.parametrize(
    ("kv_format", "scales"), [(name_of(form), form in QUANTISED) for form in FORMS], ids=FORMS
)
THIS = "tests/operators/test_kv_formats.py"
# The codes that a format has.
CODES = {"int8": range(-127, 128), "fp8_e4m3": range(256), "int4": range(16)}
NAN, INF = math.nan, math.inf
SMALLEST_NORMAL = 2.0**-126


def restored(x: Tensor, kv_format: str, scales: bool) -> Tensor:
    stored, scale = quantise(x, kv_format, scales=scales)
    return dequantise(stored, scale, kv_format)


def groups_of(x: Tensor) -> Tensor:
    return x.double().unflatten(-1, (-1, 32))


def int8_bound(x: Tensor, largest: Tensor, scales: bool) -> Tensor:
    return (largest / 253).expand(x.shape)


def e4m3_bound(x: Tensor, largest: Tensor, scales: bool) -> Tensor:
    return torch.maximum(x.abs() / 15.9, largest / 450_000) if scales else (x.abs() / 16).clamp(2.0**-10)


def int4_bound(x: Tensor, largest: Tensor, scales: bool) -> Tensor:
    high, low = groups_of(x).amax(-1), groups_of(x).amin(-1)
    scale = (high - low) / 14.9 + low.abs() / 15_000 + 2.0**-23
    return (scale / 1.99).repeat_interleave(32, dim=-1)


BOUNDS = {"int8": int8_bound, "fp8_e4m3": e4m3_bound, "int4": int4_bound}


def bound(x: Tensor, kv_format: str, scales: bool) -> Tensor:
    """The documented bound of every element, `[..., D]`, for rows without anything special."""
    x = x.double()
    return known(BOUNDS, kv_format, THIS)(x, x.abs().amax(-1, keepdim=True), scales)


def rows_of(kind: str) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(200, 64, generator=generator)
    size = torch.logspace(-20, 20, 200)[:, None]
    return {
        "normal": x,
        "large offset": x + 1000,
        "one outlier": torch.cat((x[:, :-1], 300 + 0 * x[:, :1]), dim=1),
        "any size": x * size,
        "half's sizes": x * size.clamp(1e-7, 1e4),
        "negative": -x.abs() - 3,
        "equal": x[:, :1].expand(-1, 64),
        "zeros": x * 0,
    }[kind]


KINDS = ("normal", "large offset", "one outlier", "any size", "half's sizes", "negative", "equal", "zeros")


@formats
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_documented_bounds(kv_format: str, scales: bool, kind: str, dtype: torch.dtype) -> None:
    x = rows_of(kind).to(dtype)
    x = x[x.isfinite().all(-1)]
    saturates = 448 if (kv_format, scales) == ("fp8_e4m3", False) else 65504 if kv_format == "int4" else INF
    x = x[(x.abs() <= saturates).all(-1)]
    assert len(x) >= 60 or (kind, saturates) == ("large offset", 448)
    error = (restored(x, kv_format, scales) - x.double()).abs()
    assert torch.all(error <= bound(x, kv_format, scales))


@formats
def test_the_bounds_are_not_generous(kv_format: str, scales: bool) -> None:
    """Some element comes near its bound: a format half as good would be noticed."""
    x = rows_of("normal")
    error = (restored(x, kv_format, scales) - x.double()).abs()
    assert (error / bound(x, kv_format, scales)).max() > 0.9


@formats
def test_of_two_neighbours_the_nearer(kv_format: str, scales: bool) -> None:
    """Exactly, by fractions: no other element of the format is nearer."""
    x = torch.randn(6, 32, generator=torch.Generator().manual_seed(1)) * 3
    stored, scale = quantise(x, kv_format, scales=scales)
    codes = known(CODES, kv_format, THIS)
    for row in range(len(x)):
        factor, minimum = Fraction(1), Fraction(0)
        if scale is not None:
            factor = Fraction(float(scale[row, 0, 0] if kv_format == "int4" else scale[row]))
        if kv_format == "int4":
            minimum = Fraction(float(scale[row, 0, 1]))
        values = [minimum + factor * v for c in codes if (v := code_value(kv_format, c)) is not None]
        for column in range(32):
            exact = Fraction(float(x[row, column]))
            byte = int(stored[row, column // 2]) if kv_format == "int4" else int(stored[row, column])
            code = byte >> 4 * (column % 2) & 15 if kv_format == "int4" else byte
            mine = abs(minimum + factor * code_value(kv_format, code) - exact)
            slack = factor / 2**20  # x / scale is rounded once
            assert mine <= min(abs(value - exact) for value in values) + slack


def e4m3_value(code: int) -> Fraction | None:
    exponent, mantissa = code >> 3 & 15, code & 7
    if code & 0x7F == 0x7F:
        return None
    size = Fraction(mantissa, 8) * Fraction(1, 64)
    if exponent:
        size = (1 + Fraction(mantissa, 8)) * Fraction(2) ** (exponent - 7)
    return -size if code & 128 else size


VALUES: dict[str, Callable[[int], Fraction | None]] = {
    "int8": Fraction,
    "fp8_e4m3": e4m3_value,
    "int4": Fraction,
}


def code_value(kv_format: str, code: int) -> Fraction | None:
    """The value of one stored element, by the definition of the format."""
    return known(VALUES, kv_format, THIS)(code)


def test_every_fp8_code_comes_back() -> None:
    codes = torch.tensor([c for c in range(256) if c not in (0x7F, 0xFF, 0x80)], dtype=torch.uint8)
    stored, _ = quantise(dequantise(codes, None, "fp8_e4m3"), "fp8_e4m3", scales=False)
    assert torch.equal(stored, codes)
    assert all(
        float(code_value("fp8_e4m3", int(c))) == float(dequantise(c[None], None, "fp8_e4m3")) for c in codes
    )


# ---- NaN, infinities and subnormal numbers


@formats
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_bad_number_stays_in_its_row(kv_format: str, scales: bool, bad: float) -> None:
    x = rows_of("normal")[:3].clone()
    clean = restored(x, kv_format, scales)
    x[1, 40] = bad
    dirty = restored(x, kv_format, scales)
    expected = clean.clone()
    if not scales:
        expected[1, 40] = bad if math.isnan(bad) else math.copysign(448, bad)
    else:
        expected[1, 32 if kv_format == "int4" else 0 :] = NAN
    assert torch.equal(dirty.nan_to_num(-12345.0), expected.nan_to_num(-12345.0))


@formats
def test_zeros_stay_zero(kv_format: str, scales: bool) -> None:
    for zero in (0.0, -0.0):
        stored, scale = quantise(torch.full((2, 32), zero), kv_format, scales=scales)
        assert torch.all(stored == 0)
        assert scale is None or bits_of(scale).eq(0).all()


def bits_of(x: Tensor) -> Tensor:
    return x.view(torch.int16 if x.dtype == torch.float16 else torch.int32)


def test_fp8_saturates() -> None:
    x = torch.tensor([[448.0, 449.0, 1e9, -480.0, -3e38, 447.0]])
    assert restored(x, "fp8_e4m3", False).tolist() == [[448, 448, 448, -448, -448, 448]]


def test_int4_saturates_at_the_range_of_half() -> None:
    x = torch.linspace(-1e6, 1e6, 32)[None]
    values = restored(x, "int4", True)
    assert values.isfinite().all()
    assert values[0, 0] == -65504 and abs(values[0, -1] - 65504) < 65504 / 15


@formats
def test_subnormal_numbers_are_zero(kv_format: str, scales: bool) -> None:
    x = torch.full((1, 32), SMALLEST_NORMAL / 3)
    stored, scale = quantise(x, kv_format, scales=scales)
    assert torch.all(stored == 0) and (scale is None or torch.all(scale == 0))
    x[0, 3] = 1e-36 if kv_format == "int8" else 1e-37  # a scale that would be subnormal
    if has_row_scales(kv_format) and scales:
        assert torch.all(restored(x, kv_format, scales) == 0)


def test_int4_of_a_narrow_group_far_from_zero() -> None:
    """The minimum is rounded down: the group lies between it and 15 scales above."""
    x = 1000 + torch.linspace(0.01, 0.02, 32)[None]
    _, scales = quantise(x, "int4")
    assert scales is not None
    scale, minimum = scales.double()[0, 0].tolist()
    assert minimum <= 1000.01 and minimum + 15 * scale >= 1000.02
    assert struct.pack("e", minimum) == struct.pack("e", 1000.0)
    nearest = torch.tensor([-1000.2]).half().item()
    assert nearest > -1000.2, "the control: to nearest would round up"
    _, scales = quantise(torch.full((1, 32), -1000.2), "int4")
    assert scales is not None and scales[0, 0, 1] == torch.tensor(-1000.5).half()


def test_host_and_python_have_one_table() -> None:
    """The host's is FATTN_KV_FORMATS in csrc/kernels/common/formats.h."""
    host = json.loads(torch.ops.fattn._kernel_interface())["kv_formats"]
    numbers = [one["number"] for one in host.values()]
    assert len({*numbers}) == len(numbers)
    del host["float"]
    python = {
        name: {
            "storage": {torch.int8: "Int8", torch.uint8: "UInt8"}[kind.dtype],
            "packed": kind.packed,
            "scales": "Group" if kind.group else "RowOrNone" if kind.may_lack_scales else "Row",
        }
        for name, kind in KV_FORMATS.items()
    }
    assert {name: {fact: one[fact] for fact in python[name]} for name, one in host.items()} == python
    for name, one in host.items():
        if one["scales"] == "Group":
            x = torch.linspace(0.0, one["largest"], 32)
        else:
            x = torch.full((32,), -float(one["largest"]))
        _, scales = quantise(x, name)
        assert scales is not None and float(scales.flatten()[0]) == 1.0, f"the largest code of {name}"
