"""fast::, precise:: and default functions: errors within the specification's tables, and the worst permitted
results.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from elementwise import PRECISE, WORST, evaluate

from softmetal.msl.arithmetic import Arithmetic

RNG = np.random.default_rng(5)
Function = Callable[[np.ndarray], np.ndarray]

POSITIVE = (10.0 ** RNG.uniform(-30, 30, 400)).astype(np.float32)
AROUND_ONE = RNG.uniform(0.5, 2, 400).astype(np.float32)
LOGARITHMS = np.concatenate([POSITIVE[::2], AROUND_ONE[::2]])
SMALL = RNG.uniform(-3.1, 3.1, 400).astype(np.float32)
UNIT = RNG.uniform(-0.99, 0.99, 400).astype(np.float32)
EXPONENTS = RNG.uniform(-80, 80, 400).astype(np.float32)


def ulps_of(x: np.ndarray, count: float | np.ndarray) -> np.ndarray:
    exponents = np.maximum(np.floor(np.log2(np.abs(x))), -126)
    return np.asarray(count * 2.0 ** (exponents - 23))


# name: (arguments, oracle, largest error of the fast function, of the precise one)
Bound = Callable[[np.ndarray, np.ndarray], np.ndarray]
FUNCTIONS: dict[str, tuple[np.ndarray, Function, Bound, float]] = {
    "exp": (EXPONENTS, np.exp, lambda x, y: ulps_of(y, 3 + np.floor(np.abs(2 * x))), 4),
    "exp2": (EXPONENTS, np.exp2, lambda x, y: ulps_of(y, 3 + np.floor(np.abs(2 * x))), 4),
    "log": (LOGARITHMS, np.log, lambda x, y: np.where((x >= 0.5) & (x <= 2), 2.0**-21, ulps_of(y, 3)), 4),
    "log2": (LOGARITHMS, np.log2, lambda x, y: np.where((x >= 0.5) & (x <= 2), 2.0**-22, ulps_of(y, 2)), 4),
    "sin": (SMALL, np.sin, lambda x, y: np.full_like(y, 2.0**-13), 4),
    "cos": (SMALL, np.cos, lambda x, y: np.full_like(y, 2.0**-13), 4),
    "asin": (UNIT, np.arcsin, lambda x, y: ulps_of(y, 5), 4),
    "acos": (UNIT, np.arccos, lambda x, y: ulps_of(y, 5), 4),
    "atan": (SMALL, np.arctan, lambda x, y: ulps_of(y, 5), 5),
    "rsqrt": (POSITIVE, lambda x: 1 / np.sqrt(x), lambda x, y: ulps_of(y, 2), 0.5),
}


@pytest.fixture(scope="module")
def results() -> list[dict[str, np.ndarray]]:
    """The best and the worst permitted ones, by text."""
    texts = [f"{variant}::{name}({name}_x)" for name in FUNCTIONS for variant in ("fast", "precise")]
    inputs = {f"{name}_x": x for name, (x, *_) in FUNCTIONS.items()}
    return [evaluate(dict.fromkeys(texts, "float"), each, **inputs) for each in (PRECISE, WORST)]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_errors_are_within_the_tables_and_reach_them(results: list[dict[str, np.ndarray]], name: str) -> None:
    x, oracle, fast_bound, precise_ulps = FUNCTIONS[name]
    exact = oracle(x.astype(np.float64))
    bounds = {
        f"fast::{name}({name}_x)": fast_bound(x.astype(np.float64), exact),
        f"precise::{name}({name}_x)": ulps_of(exact, precise_ulps),
    }
    for text, bound in bounds.items():
        best, worst = (each[text] for each in results)
        limit = bound * (1 + 1e-9) + 1e-50
        assert (np.abs(best - exact) <= np.maximum(limit, ulps_of(exact, 1))).all(), text
        error = np.abs(worst - exact)
        assert (error <= limit).all(), text
        # A float's distance from the bound is at most one step.
        if precise_ulps > 0.5 or text.startswith("fast"):
            assert (error >= bound - ulps_of(exact, 1.01)).all(), text
            signs = np.sign(worst - exact)
            assert 0.3 < (signs > 0).mean() < 0.7, "errors go both ways"


def test_a_fast_reciprocal_is_closer_than_other_quotients() -> None:
    """1.0 / x is within 1 ulp, x / y within 2.5."""
    x = POSITIVE[np.abs(np.log10(POSITIVE)) < 25]
    for numerator, ulps in ((1.0, 1.0), (3.0, 2.5)):
        text = f"fast::divide({numerator}f, x)"
        exact = numerator / x.astype(np.float64)
        error = np.abs(evaluate({text: "float"}, WORST, x=x)[text] - exact) / ulps_of(exact, 1)
        assert ulps - 1.01 <= error.min() and error.max() <= ulps * (1 + 1e-9), text


def test_fast_tanpi_is_tan_of_a_rounded_product() -> None:
    x = UNIT[np.abs(np.abs(UNIT) - 0.5) > 0.01] + np.float32(4)
    texts = dict.fromkeys(("fast::tanpi(x)", "fast::tan(x * M_PI_F)", "precise::tanpi(x)"), "float")
    got = evaluate(texts, replace(PRECISE, contract=False), x=x)
    np.testing.assert_array_equal(got["fast::tanpi(x)"], got["fast::tan(x * M_PI_F)"])
    assert (got["precise::tanpi(x)"] != got["fast::tanpi(x)"]).any()


def test_default_functions_follow_the_options() -> None:
    x = POSITIVE
    for functions in ("fast", "precise"):
        arithmetic = Arithmetic(mode="safe", functions=functions, worst=True)
        got = evaluate(dict.fromkeys(("log(x)", "fast::log(x)", "precise::log(x)"), "float"), arithmetic, x=x)
        np.testing.assert_array_equal(got["log(x)"], got[f"{functions}::log(x)"])
        assert (got["fast::log(x)"] != got["precise::log(x)"]).any()


def test_fast_functions_flush_and_have_the_domains_of_their_formulas() -> None:
    tiny = np.array([1e-40], np.float32)
    texts = {
        "fast::log2(x)": -np.inf,
        "fast::exp2(-130.0f)": 0,
        "fast::sqrt(x)": 0,
        "fast::tanh(60.0f)": np.nan,  # (t - 1) / (t + 1), t infinite
        "fast::pow(-2.0f, 2.0f)": np.nan,  # exp2(y * log2(x))
        "fast::divide(0x1p100f, 0x1p127f)": 0,
        "fast::sqrt(INFINITY)": np.inf,
        "fast::exp2(-INFINITY)": 0,
        "fast::pow(2.0f, 10.0f)": 1024,
        "precise::log2(x)": np.log2(tiny[0].astype(np.float64)),
        "precise::exp2(-130.0f)": 2.0**-130,
        "precise::tanh(60.0f)": 1,
        "precise::pow(-2.0f, 2.0f)": 4,
        "precise::divide(0x1p100f, 0x1p127f)": 2.0**-27,
        "precise::powr(0.0f, 0.0f)": np.nan,
        "precise::pow(0.0f, 0.0f)": 1,
        "precise::sinpi(1.0f) == 0.0f": 1,
        "precise::cospi(0.5f)": 0,
    }
    got = evaluate(dict.fromkeys(texts, "float"), x=tiny)
    for text, expected in texts.items():
        np.testing.assert_allclose(got[text][0], expected, rtol=2e-7, err_msg=text)


@pytest.mark.parametrize("name", ("exp", "log", "sin", "tanh", "rsqrt"))
def test_half_functions_err_by_one_ulp_at_most(name: str) -> None:
    """In both math modes: the table of half has no column for fast functions."""
    x = (2.0 ** RNG.uniform(-8, 3, 500)).astype(np.float16)
    oracle = {"rsqrt": lambda v: 1 / np.sqrt(v)}.get(name, getattr(np, name, None))
    assert oracle is not None
    exact = oracle(x.astype(np.float64))
    ulp = np.abs(np.spacing(exact.astype(np.float16))).astype(np.float64)
    for arithmetic in (PRECISE, WORST, replace(WORST, functions="fast")):
        got = evaluate({f"{name}(x)": "half"}, arithmetic, x=x)[f"{name}(x)"]
        assert (np.abs(got - exact) <= ulp * 1.001).all()


def test_worst_arithmetic_flushes_subnormal_floats() -> None:
    x = np.array([1e-40, -1e-39, 1e-30, 2e-38], np.float32)
    texts = {"x + 0.0f": x, "x * 1024.0f": x * 1024, "x * x": x * x, "x * 0.25f": x * np.float32(0.25)}
    best = evaluate(dict.fromkeys(texts, "float"), PRECISE, x=x)
    worst = evaluate(dict.fromkeys(texts, "float"), WORST, x=x)

    def flushed(values: np.ndarray) -> np.ndarray:
        return np.where(np.abs(values) < np.finfo(np.float32).tiny, 0, values).astype(np.float32)

    for text, expected in texts.items():
        np.testing.assert_array_equal(best[text], expected, err_msg=text)
        of_flushed = flushed(expected) * (flushed(x) != 0)
        np.testing.assert_array_equal(worst[text], of_flushed, err_msg=text)


def test_environment_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOFTMETAL_CONTRACT", "0")
    monkeypatch.setenv("SOFTMETAL_FAST_MATH", "worst")
    assert (Arithmetic().contract, Arithmetic().worst) == (False, True)
    monkeypatch.delenv("SOFTMETAL_CONTRACT")
    monkeypatch.setenv("SOFTMETAL_FAST_MATH", "exact")
    assert (Arithmetic().contract, Arithmetic().worst) == (True, False)
    monkeypatch.setenv("SOFTMETAL_CONTRACT", "yes")
    with pytest.raises(ValueError, match="SOFTMETAL_CONTRACT is 'yes'; use 1 or 0"):
        Arithmetic()
