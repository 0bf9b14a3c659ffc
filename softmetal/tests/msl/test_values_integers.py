"""Integer functions, shifts, divisions and conversions, compared with Python's integers at the extremes of
every type.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from elementwise import TYPES, evaluate, integers, pairs

KINDS = ("char", "uchar", "short", "ushort", "int", "uint", "long", "ulong")


class Width:
    """Arithmetic of one integer type, on Python's integers."""

    def __init__(self, kind: str) -> None:
        limits = np.iinfo(TYPES[kind])
        self.bits, self.low, self.high = limits.bits, int(limits.min), int(limits.max)

    def wrap(self, x: int) -> int:
        x &= (1 << self.bits) - 1
        return x - (1 << self.bits) if self.low and x > self.high else x

    def limit(self, x: int) -> int:
        return min(max(x, self.low), self.high)

    def unsigned(self, x: int) -> int:
        return x & ((1 << self.bits) - 1)

    def rotate(self, x: int, n: int) -> int:
        n, x = n % self.bits, self.unsigned(x)
        return self.wrap(x << n | x >> (self.bits - n))

    def leading_zeros(self, x: int) -> int:
        return self.bits - self.unsigned(x).bit_length()

    def trailing_zeros(self, x: int) -> int:
        x = self.unsigned(x)
        return (x & -x).bit_length() - 1 if x else self.bits

    def reversed(self, x: int) -> int:
        return self.wrap(int(f"{self.unsigned(x):0{self.bits}b}"[::-1], 2))


Oracle = Callable[[Width, int, int], int]
ORACLES: dict[str, Oracle] = {
    "min(a, b)": lambda w, a, b: min(a, b),
    "max(a, b)": lambda w, a, b: max(a, b),
    "abs(a)": lambda w, a, b: w.wrap(abs(a)),
    "addsat(a, b)": lambda w, a, b: w.limit(a + b),
    "subsat(a, b)": lambda w, a, b: w.limit(a - b),
    "hadd(a, b)": lambda w, a, b: (a + b) >> 1,
    "rhadd(a, b)": lambda w, a, b: (a + b + 1) >> 1,
    "mulhi(a, b)": lambda w, a, b: (a * b) >> w.bits,
    "madhi(a, b, a)": lambda w, a, b: w.wrap(((a * b) >> w.bits) + a),
    "madsat(a, b, b)": lambda w, a, b: w.limit(a * b + b),
    "rotate(a, b)": lambda w, a, b: w.rotate(a, b),
    "popcount(a)": lambda w, a, b: w.unsigned(a).bit_count(),
    "clz(a)": lambda w, a, b: w.leading_zeros(a),
    "ctz(a)": lambda w, a, b: w.trailing_zeros(a),
    "reverse_bits(a)": lambda w, a, b: w.reversed(a),
    "clamp(a, min(a, b), b)": lambda w, a, b: min(max(a, min(a, b)), b),
    "max3(a, b, max(a, b))": lambda w, a, b: max(a, b),
    "numeric_limits<decltype(a)>::max()": lambda w, a, b: w.high,
    "median3(a, b, min(a, b))": lambda w, a, b: sorted([a, b, min(a, b)])[1],
    "extract_bits(a, 3, 5)": lambda w, a, b: _extract(w, a, 3, 5),
    "extract_bits(a, 0, 8 * sizeof(a))": lambda w, a, b: a,
    "extract_bits(a, 8 * sizeof(a) - 1, 1)": lambda w, a, b: _extract(w, a, w.bits - 1, 1),
    "extract_bits(a, 2, 0)": lambda w, a, b: 0,
    "insert_bits(a, b, 2, 4)": lambda w, a, b: w.wrap((a & ~(15 << 2)) | (b & 15) << 2),
    "insert_bits(a, b, 0, 8 * sizeof(a))": lambda w, a, b: b,
    "insert_bits(a, b, 1, 0)": lambda w, a, b: a,
}


def _extract(width: Width, x: int, offset: int, bits: int) -> int:
    field = width.unsigned(x) >> offset & ((1 << bits) - 1)
    return field - (1 << bits) if width.low and field >> (bits - 1) else field


@pytest.mark.parametrize("kind", KINDS)
def test_functions(kind: str) -> None:
    width = Width(kind)
    a, b = pairs(integers(kind))
    unsigned = kind if kind.startswith("u") else f"u{kind}"
    # Also by element of a vector. absdiff returns an unsigned number for signed arguments.
    kinds = dict.fromkeys(ORACLES, kind)
    vectors = {
        text: text.replace("(a, b", f"({kind}3(a), {kind}3(b)", 1).replace("(a)", f"({kind}3(a))", 1) + ".y"
        for text in (
            "min(a, b)",
            "abs(a)",
            "addsat(a, b)",
            "mulhi(a, b)",
            "rotate(a, b)",
            "clz(a)",
            "hadd(a, b)",
        )
    }
    got = evaluate({**kinds, **dict.fromkeys(vectors.values(), kind), "absdiff(a, b)": unsigned}, a=a, b=b)
    for text, oracle in ORACLES.items():
        expected = [oracle(width, int(x), int(y)) for x, y in zip(a, b, strict=True)]
        np.testing.assert_array_equal(got[text], np.array(expected, TYPES[kind]), err_msg=text)
        if text in vectors:
            np.testing.assert_array_equal(got[vectors[text]], got[text], err_msg=vectors[text])
    differences = [abs(int(x) - int(y)) for x, y in zip(a, b, strict=True)]
    np.testing.assert_array_equal(got["absdiff(a, b)"], np.array(differences, TYPES[unsigned]))


def test_absdiff_is_unsigned() -> None:
    got = evaluate(
        {
            "is_same_v<decltype(absdiff(a, a)), uint>": "bool",
            "is_same_v<decltype(absdiff(short2(a), short2(a))), ushort2>": "bool",
            "is_same_v<decltype(absdiff(a, a)), int>": "bool",
        },
        a=np.zeros(1, np.int32),
    )
    assert [bool(v[0]) for v in got.values()] == [True, True, False]


@pytest.mark.parametrize("kind", ("int", "uint", "long", "ulong"))
def test_shifts_take_the_low_bits_of_the_amount(kind: str) -> None:
    width = Width(kind)
    a = np.repeat(integers(kind, 0)[:6], 200)
    n = np.tile(np.arange(-100, 100, dtype=np.int32), 6)
    got = evaluate({"a << n": kind, "a >> n": kind, f"({kind}2(a) << {kind}2(n)).y": kind}, a=a, n=n)
    left = [width.wrap(int(x) << (int(k) % width.bits)) for x, k in zip(a, n, strict=True)]
    right = [int(x) >> (int(k) % width.bits) for x, k in zip(a, n, strict=True)]
    np.testing.assert_array_equal(got["a << n"], np.array(left, TYPES[kind]))
    np.testing.assert_array_equal(got["a >> n"], np.array(right, TYPES[kind]))
    np.testing.assert_array_equal(got[f"({kind}2(a) << {kind}2(n)).y"], got["a << n"])


@pytest.mark.parametrize("mode", ("fast", "checked"))
def test_division_never_faults(mode: str) -> None:
    """Quotients round towards zero; cases that Metal leaves unspecified also have a value."""
    operands = {kind: pairs(integers(kind)) for kind in KINDS}
    inputs = {f"{kind}_a": a for kind, (a, _) in operands.items()}
    inputs |= {f"{kind}_b": b for kind, (_, b) in operands.items()}
    forms = (
        "{0}_a / {0}_b",
        "{0}_a % {0}_b",
        "({0}4({0}_a) / {0}4({0}_b)).w",
        "({0}4({0}_a) % {0}4({0}_b)).x",
    )
    texts = {form.format(kind): kind for kind in KINDS for form in forms}
    got = evaluate(texts, mode=mode, **inputs)
    for kind, (a, b) in operands.items():
        width = Width(kind)
        quotient, remainder, quotients, remainders = (got[form.format(kind)] for form in forms)
        for x, y, q, r in zip(a.tolist(), b.tolist(), quotient.tolist(), remainder.tolist(), strict=True):
            if y != 0:
                exact = abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)
                assert (q, r) == (width.wrap(exact), x - exact * y), (kind, x, y)
            else:
                assert (q, r) == (width.wrap(-1), x), kind
        np.testing.assert_array_equal(quotients, quotient)
        np.testing.assert_array_equal(remainders, remainder)


@pytest.mark.parametrize("source", ("float", "half"))
def test_conversion_from_floats_saturates(source: str) -> None:
    with np.errstate(over="ignore"):
        values: np.ndarray = np.array(
            [0.0, -0.0, 0.5, -0.5, 1.99, -1.99, 127.5, 128, -128.9, -129, 255.9, 256, 32767.5, -32769, 65504,
             -65504, 2**31, -(2.0**31), 2**32, 2**63, -(2.0**63), 2**64, 3e38, -3e38, np.inf, -np.inf,
             np.nan],
            np.float64,
        ).astype(TYPES[source])  # fmt: skip
    forms = ("{kind}(x)", "({kind})x", "{kind}4({source}4(x)).z")
    texts = {form.format(kind=kind, source=source): kind for kind in KINDS for form in forms}
    for text, got in evaluate(texts, x=values).items():
        width = Width(texts[text])
        expected = [
            0 if np.isnan(x) else int(min(max(x, width.low), width.high))
            for x in values.astype(np.float64).tolist()
        ]
        np.testing.assert_array_equal(got, np.array(expected, TYPES[texts[text]]), err_msg=text)


def test_24_bit_products() -> None:
    a, b = pairs(integers("int"))
    got = evaluate({"mul24(a, b)": "int", "mad24(uint(a), uint(b), 7u)": "uint"}, a=a, b=b)

    def low24(x: int) -> int:
        x &= 0xFFFFFF
        return x - (1 << 24) if x >> 23 else x

    width = Width("int")
    signed = [width.wrap(low24(int(x)) * low24(int(y))) for x, y in zip(a, b, strict=True)]
    np.testing.assert_array_equal(got["mul24(a, b)"], signed)
    unsigned = [
        ((int(x) & 0xFFFFFF) * (int(y) & 0xFFFFFF) + 7) & 0xFFFFFFFF for x, y in zip(a, b, strict=True)
    ]
    np.testing.assert_array_equal(got["mad24(uint(a), uint(b), 7u)"], np.array(unsigned, np.uint32))
