"""Comparisons and logical operators of vectors return vectors of bool with elements 0 and 1; all others
return the same as in C++.
"""

from __future__ import annotations

import numpy as np
import pytest
from elementwise import evaluate

from softmetal.msl.angles import template_brackets
from softmetal.msl.lexer import TokenList

RNG = np.random.default_rng(0)
A = RNG.integers(-2, 3, 64).astype(np.float32)
B = RNG.integers(-2, 3, 64).astype(np.float32)
VECTORS = """
float4 left(float a, float b) { return float4(a, b, 0, 1); }
float4 right(float a, float b) { return float4(b, a, a, b); }
int auto_element(float a, float b) { auto m = left(a, b) < right(a, b); int i = m.x; return i; }
template <typename T> int as_int(T m) { return int(m.x) + 2 * int(m.y); }
template <typename T> int compared(T a, T b) { auto m = a < b; return m[0] + 10 * m[1]; }
template <typename T> bool is_boolean(T) { return is_same_v<T, bool4>; }
template <int N> int pick(int x) { return N + x; }
template <typename T, int N = (sizeof(T) < 8 ? 1 : 2)> int width_class() { return N; }
template <typename T, enable_if_t<sizeof(T) < 8, bool> = true> int narrow(T) { return 1; }
template <typename T, enable_if_t<(sizeof(T) >= 8), bool> = true> int narrow(T) { return 2; }
template <typename... T> constexpr int count(T...) { return sizeof...(T) > 2 ? 3 : sizeof...(T); }
constant bool kSmall = sizeof(int) < 8 && !(sizeof(int) < 2);
constant constexpr int kTable[3 < 4 ? 2 : 1] = {5, 6};
int positive(int x) { if (!x || x < 0) return 0; return x >= 1 && !(x == 7); }
struct Vector {
  int x;
  bool operator<(Vector o) const { return x < o.x; }
  bool operator!() const { return x == 0; }
};
int step(int x) { int step = 3; return step < x ? step : x > (2) ? 1 : 0; }
"""


def test_elements_are_zero_and_one() -> None:
    x, y, u, v = A, B, B, A  # the elements x and y of left(a, b) and right(a, b)
    less_x, less_y = A < B, B < A
    table = {
        "auto_element(a, b)": less_x,
        "(left(a, b) < right(a, b)).x + 1": less_x + 1,
        "-(left(a, b) < right(a, b)).x": -less_x.astype(int),
        "float4(left(a, b) < right(a, b)).y": less_y,
        "int4(left(a, b) != right(a, b)).x": x != u,
        "half4(left(a, b) == right(a, b)).y": y == v,
        "int((int2(a) >= int2(b)).x)": x >= u,
        "as_int(left(a, b) <= right(a, b))": (x <= u) + 2 * (y <= v),
        "compared(left(a, b), right(a, b))": less_x + 10 * less_y,
        "is_boolean(left(a, b) < right(a, b))": np.ones(64),
        "is_boolean(!(left(a, b) < right(a, b)))": np.ones(64),
        "is_boolean(left(a, b) < 0.0f && right(a, b) < 0.0f)": np.ones(64),
        "int((left(a, b) < 0.0f && right(a, b) < 0.0f)[0])": (A < 0) & (B < 0),
        "int((left(a, b) < 0.0f || right(a, b) < 0.0f)[1])": (A < 0) | (B < 0),
        "int((!(left(a, b) < 0.0f))[0]) + 5": (A >= 0) + 5,
        "int(((left(a, b) < 0.0f) == (right(a, b) < 0.0f))[0]) * 3": ((A < 0) == (B < 0)) * 3,
        "int((!left(a, b))[0])": A == 0,
        "any(left(a, b) < right(a, b)) + 2 * all(left(a, b) <= right(a, b))": _any_all(A, B),
        "select(left(a, b), right(a, b), left(a, b) < right(a, b)).x": np.where(less_x, B, A),
        "(left(a, b) < right(a, b)).y ? 3 : 4": np.where(less_y, 3, 4),
        "int((3 > int2(a))[1])": A < 3,
    }
    got = evaluate(dict.fromkeys(table, "int"), body=VECTORS, a=A, b=B)
    for text, expected in table.items():
        np.testing.assert_array_equal(got[text], np.asarray(expected).astype(np.int32), err_msg=text)


def _any_all(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    left = np.stack([a, b, np.zeros_like(a), np.ones_like(a)])
    right = np.stack([b, a, a, b])
    return np.asarray((left < right).any(axis=0) + 2 * (left <= right).all(axis=0))


def test_scalars_templates_and_constants_are_as_in_cpp() -> None:
    a, b = RNG.integers(-3, 9, 64).astype(np.int32), RNG.integers(-3, 9, 64).astype(np.int32)
    table = {
        "a < b && b < 5 || a == 7": (a < b) & (b < 5) | (a == 7),
        "a << 2 < b >> 1": (a << 2) < (b >> 1),
        "(a & 3) == 2 | b > 1": ((a & 3) == 2) | (b > 1),
        "a > b == (b < a)": np.ones(64),
        "a < b == b > a != false": (a < b) == (b > a),
        "1 + (a < b) * 2": 1 + (a < b) * 2,
        "a < b ? a : b < 0 ? 1 : 2": np.where(a < b, a, np.where(b < 0, 1, 2)),
        "b != 0 && a / b > 1": [y != 0 and abs(x) // abs(y) * (1 if x * y > 0 else -1) > 1
                                for x, y in zip(a.tolist(), b.tolist(), strict=True)],
        "pick<3>(a) > pick<2>(b)": (3 + a) > (2 + b),
        "pick<(2 > 1)>(a)": 1 + a,
        "width_class<int>() + 10 * width_class<long>()": np.full(64, 21),
        "narrow(a) + 10 * narrow(long(a))": np.full(64, 21),
        "count(a, b) + 10 * count(a, b, a)": np.full(64, 32),
        "kSmall + kTable[1]": np.full(64, 7),
        "positive(a)": (a >= 1) & (a != 7),
        "(Vector{a} < Vector{b}) + 2 * !Vector{a}": (a < b) + 2 * (a == 0),
        "step(a)": np.where(a > 3, 3, np.where(a > 2, 1, 0)),
        "is_same_v<int, int> && a > 0 and not (b > 0)": (a > 0) & ~(b > 0),
        "(uint)a < 4u": a.view(np.uint32) < 4,
        "&a == &a": np.ones(64),
        "max(a, b) > min(a, b)": a != b,
    }  # fmt: skip
    got = evaluate(dict.fromkeys(table, "int"), body=VECTORS, a=a, b=b)
    for text, expected in table.items():
        np.testing.assert_array_equal(got[text], np.asarray(expected).astype(np.int32), err_msg=text)


@pytest.mark.parametrize(
    ("text", "pairs"),
    [
        ("vec<float, 4> x = a < b;", 1),
        ("if (a < b && c > d) f<int>(x);", 1),
        ("template <typename T> T g(T x); int y = g<vec<int, 2>>(x) >> 1;", 3),
        ("template <typename T> T g(T x); bool y = g < 2 || x > 1;", 1),
        ("enable_if_t<sizeof(T) < 8> x;", 1),
        ("template <int N, enable_if_t<N < 8, bool> = true> int f();", 2),
        ("bool4 x = float4(*reinterpret_cast<const device half4*>(p)) < 2;", 1),
        ("for (int i = 0; i < n; i++) x = i > 1;", 0),
        ("a = static_cast<device int*>(p) < q;", 1),
    ],
)
def test_which_angles_are_brackets(text: str, pairs: int) -> None:
    assert len(template_brackets(TokenList(text))) == 2 * pairs


def test_a_scalar_takes_the_type_of_the_vector() -> None:
    a = np.arange(16, dtype=np.int32)
    got = evaluate(
        {
            "(float4(0.5) * a).y": "float",
            "(half4(0.5) + 2.25f).x": "half",
            "is_same_v<decltype(half4(0) * 2.0f), half4>": "bool",
            "is_same_v<decltype(uchar4(0) + 'a'), uchar4>": "bool",
            "(int4(a) / 2).z": "int",
        },
        a=a,
    )
    assert got.pop("is_same_v<decltype(half4(0) * 2.0f), half4>").all()
    assert got.pop("is_same_v<decltype(uchar4(0) + 'a'), uchar4>").all()
    for values, expected in zip(got.values(), (a * 0.5, np.full(16, 2.75), a // 2), strict=True):
        np.testing.assert_array_equal(values, expected)
