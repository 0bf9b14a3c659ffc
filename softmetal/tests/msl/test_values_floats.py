"""Floating point: contraction, rounding of half and bfloat, common functions and their edge cases, compared
with numpy and exact fractions.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from elementwise import PRECISE, evaluate, pairs

RNG = np.random.default_rng(3)
EDGES = [
    0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, -1.5, 2.5, -2.5, np.inf, -np.inf, np.nan, 2.0, 3.0, 1e-3,
    65504.0, -7.25,
]  # fmt: skip
FLOATS = np.concatenate([EDGES, RNG.standard_normal(150) * 10.0 ** RNG.integers(-6, 6, 150)]).astype(
    np.float32
)
UNCONTRACTED = replace(PRECISE, contract=False)


def nearest(exact: Fraction, kind: type) -> np.floating:
    """Returns the number of that type nearest to a fraction, ties to even."""
    guess = kind(float(exact))
    neighbours = [guess, np.nextafter(guess, kind(np.inf)), np.nextafter(guess, kind(-np.inf))]
    return min(neighbours, key=lambda x: (abs(Fraction(float(x)) - exact), int(x.view(f"u{x.itemsize}")) & 1))


# c is about -a * b, d about a * b.
CONTRACTED = {
    "a * b + c": lambda a, b, c, d: a * b + c,
    "d - a * b": lambda a, b, c, d: d - a * b,
    "a * b - d": lambda a, b, c, d: a * b - d,
    "-(a * b) + d": lambda a, b, c, d: d - a * b,
    "separated(a, b, c)": lambda a, b, c, d: a * b + c,
}


@pytest.mark.parametrize("mode", ("fast", "checked"))
@pytest.mark.parametrize("kind", ("float", "half"))
def test_contraction_rounds_once(kind: str, mode: str) -> None:
    """Also across statements and for each element of vectors; without contraction, every operation rounds."""
    body = f"{kind} separated({kind} a, {kind} b, {kind} c) {{ {kind} product = a * b; return product + c; }}"
    dtype = np.float32 if kind == "float" else np.float16
    a, b = (1 + RNG.random((2, 300))).astype(dtype)
    c = -(a.astype(np.float64) * b).astype(dtype)  # cancels all but the rounding error of the product
    texts = [*CONTRACTED, f"({kind}4(a) * {kind}4(b) + {kind}4(c)).y"]
    got = evaluate(dict.fromkeys(texts, kind), body=body, mode=mode, a=a, b=b, c=c, d=-c)
    apart = evaluate(dict.fromkeys(texts, kind), UNCONTRACTED, body=body, mode=mode, a=a, b=b, c=c, d=-c)
    exact = [tuple(Fraction(float(v)) for v in row) for row in zip(a, b, c, -c, strict=True)]
    for text in texts:
        oracle = CONTRACTED.get(text, CONTRACTED["a * b + c"])
        expected = np.array([nearest(oracle(*row), dtype) for row in exact], dtype)
        np.testing.assert_array_equal(got[text], expected, err_msg=text)
        np.testing.assert_array_equal(apart[text], oracle(a, b, c, -c).astype(dtype), err_msg=text)
        assert (got[text] != apart[text]).mean() > 0.3, text


def test_contraction_can_be_switched_off_in_the_source() -> None:
    body = """
    float apart(float a, float b, float c) {
    #pragma METAL fp contract(off)
      return a * b + c;
    }
    float once(float a, float b, float c) { return a * b + c; }
    """
    a = np.array([1 + 2**-12], np.float32)
    for text, expected in {"apart(a, a, -1.0)": a * a - 1, "once(a, a, -1.0)": 2**-11 + 2**-24}.items():
        assert evaluate({text: "float"}, body=body, a=a)[text] == expected


def test_half_fma_rounds_once() -> None:
    bits = (
        RNG.integers(0, 0x7C00, (3, 2000), dtype=np.uint16)
        | RNG.integers(0, 2, (3, 2000), dtype=np.uint16) << 15
    )
    a, b, c = bits.view(np.float16)
    got = evaluate({"fma(a, b, c)": "half", "a * b + c": "half"}, a=a, b=b, c=c)
    for i in range(2000):
        x, y, z = (Fraction(float(v[i])) for v in (a, b, c))
        exact = x * y + z
        if abs(exact) >= 65520:
            assert np.isinf(got["fma(a, b, c)"][i])
        else:
            assert got["fma(a, b, c)"][i] == nearest(exact, np.float16), (a[i], b[i], c[i])
    np.testing.assert_array_equal(got["a * b + c"], got["fma(a, b, c)"])


def to_bfloat(x: np.ndarray) -> np.ndarray:
    """float32 rounded to bfloat, nearest even, as float32."""
    bits = x.astype(np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return np.where(np.isnan(x), np.float32(np.nan), rounded.astype(np.uint32).view(np.float32))


def test_half_and_bfloat_round_every_operation() -> None:
    a, b = pairs(FLOATS)
    with np.errstate(all="ignore"):
        h, g = a.astype(np.float16), b.astype(np.float16)
        p, q = to_bfloat(a), to_bfloat(b)
        halves = {"h + g": h + g, "h - g": h - g, "h * g": h * g, "h / g": h / g, "half(a)": h}
        brains = {
            "float(bfloat(a))": p,
            "float(bfloat(a) + bfloat(b))": to_bfloat(p + q),
            "float(bfloat(a) * bfloat(b))": to_bfloat(p * q),
            "float(bfloat(a) * bfloat(b) + bfloat(a))": to_bfloat(to_bfloat(p * q) + p),
        }
    got = evaluate({**dict.fromkeys(halves, "half"), **dict.fromkeys(brains, "float")}, a=a, b=b, h=h, g=g)
    for text, expected in {**halves, **brains}.items():
        np.testing.assert_array_equal(got[text], expected, err_msg=text)


def _away(x: np.ndarray) -> np.ndarray:
    return np.copysign(np.floor(np.abs(x) + 0.5), x)


@pytest.mark.parametrize("kind", ("float", "half"))
def test_common_functions_and_their_edges(kind: str) -> None:
    dtype = np.float32 if kind == "float" else np.float16
    with np.errstate(all="ignore"):
        values = FLOATS.astype(dtype)
        a, b = pairs(np.concatenate([values[:18][::-1], values[18:]]))
        wide, other = a.astype(np.float64), b.astype(np.float64)
        unary = {
            "floor(a)": np.floor(wide), "ceil(a)": np.ceil(wide), "trunc(a)": np.trunc(wide),
            "rint(a)": np.rint(wide), "round(a)": _away(wide), "fabs(a)": np.abs(wide),
            "sqrt(a)": np.sqrt(wide),
            "sign(a)": np.where(np.isnan(wide), 0, np.sign(wide)),
            "saturate(a)": np.where(np.isnan(wide), 0, np.clip(wide, 0, 1)),
            "copysign(a, b)": np.copysign(wide, other), "fmod(a, b)": np.fmod(wide, other),
            "fmin(a, b)": np.fmin(wide, other), "fmax(a, b)": np.fmax(wide, other),
            "min(a, b)": np.fmin(wide, other), "max(a, b)": np.fmax(wide, other),
            "step(a, b)": np.where(other < wide, 0, 1),
            "fdim(a, b)": np.where(wide <= other, 0, wide - other),
            f"clamp(a, {kind}(-1), {kind}(2))": np.fmin(np.fmax(wide, -1), 2),
        }  # fmt: skip
        table = {text: expected.astype(dtype) for text, expected in unary.items()}
    vectors = {f"{text.replace('(a', f'({kind}3(a)').replace(', b', f', {kind}3(b)')}.z": table[text]
               for text in ("floor(a)", "fmod(a, b)", "max(a, b)", "rint(a)")}  # fmt: skip
    for text, got in evaluate(dict.fromkeys([*table, *vectors], kind), a=a, b=b).items():
        np.testing.assert_array_equal(got, {**table, **vectors}[text], err_msg=text)


@pytest.mark.parametrize("kind", ("float", "half"))
def test_parts_of_a_number(kind: str) -> None:
    dtype = np.float32 if kind == "float" else np.float16
    tiny = [
        float(np.finfo(dtype).smallest_subnormal),
        float(np.finfo(dtype).tiny),
        -float(np.finfo(dtype).max),
    ]
    values = np.concatenate([FLOATS.clip(-60000, 60000), tiny]).astype(dtype)
    finite = values[np.isfinite(values)]
    nonzero = finite[finite != 0]
    body = f"""
    {kind} whole({kind} x) {{ {kind} i; modf(x, i); return i; }}
    {kind} rest({kind} x) {{ {kind} i; return modf(x, i); }}
    {kind} mantissa({kind} x) {{ int e; return frexp(x, e); }}
    int exponent({kind} x) {{ int e; frexp(x, e); return e; }}
    {kind} second({kind} x) {{ vec<int, 2> e; return frexp(vec<{kind}, 2>(1, x), e).y; }}
    """
    real = dict.fromkeys(("whole(a)", "rest(a)", "mantissa(a)", "second(a)", "fract(a)", "ldexp(a, 3)"), kind)
    got = evaluate({**real, "exponent(a)": "int"}, body=body, a=finite)
    rest, whole = np.modf(finite)
    mantissa, exponent = np.frexp(finite)
    np.testing.assert_array_equal(got["whole(a)"], whole)
    np.testing.assert_array_equal(got["rest(a)"], rest)
    np.testing.assert_array_equal(got["mantissa(a)"], mantissa)
    np.testing.assert_array_equal(got["second(a)"], mantissa)
    np.testing.assert_array_equal(got["exponent(a)"], exponent)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(got["ldexp(a, 3)"], np.ldexp(finite, 3))
    below_one = np.nextafter(dtype(1), dtype(0))
    exact = finite.astype(np.float64) - np.floor(finite.astype(np.float64))
    np.testing.assert_array_equal(got["fract(a)"], np.minimum(exact.astype(dtype), below_one))
    assert got["fract(a)"].max() < 1
    texts = {"nextafter(a, b)": kind, "ilogb(a)": "int"}
    got = evaluate(texts, a=nonzero, b=nonzero[::-1].copy())
    np.testing.assert_array_equal(got["nextafter(a, b)"], np.nextafter(nonzero, nonzero[::-1]))
    np.testing.assert_array_equal(got["ilogb(a)"], np.frexp(nonzero.astype(np.float64))[1] - 1)


def test_blends() -> None:
    low, high = RNG.standard_normal((2, 100)).astype(np.float32)
    t = RNG.random(100).astype(np.float32)
    got = evaluate({"mix(a, b, t)": "float", "smoothstep(0.25, 0.75, t)": "float"}, a=low, b=high, t=t)
    wide = low + (high.astype(np.float64) - low) * t
    np.testing.assert_allclose(got["mix(a, b, t)"], wide, atol=5e-7)
    s = np.clip((t.astype(np.float64) - 0.25) / 0.5, 0, 1)
    np.testing.assert_allclose(got["smoothstep(0.25, 0.75, t)"], s * s * (3 - 2 * s), atol=1e-6)
