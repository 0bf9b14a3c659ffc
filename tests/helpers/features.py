"""Which features meet in a set of problems, two by two.

A feature is a value of an axis: a field of Problem, sizes as small, middle and large. Most faults show where
two features meet, so a set of problems should hold every two that can.
"""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from typing import Any

from tests.helpers.kv_formats import UNSCALED
from tests.helpers.problems import OPTIONS, Problem

FEW = 5  # values of an axis
Feature = tuple[str, Any]  # axis, value
Pair = tuple[str, Feature, Feature]  # with the op

_SIZES = {"index", "op", "batch", "q_heads", "kv_heads", "q_len", "kv_len", "head_dim", "value_dim"}
_SIZES |= {"shared_keys"}  # which test_shared_prefix.py draws
_OF_MASK = {"mask_broadcast", "mask_layout", "mask_pattern", "mask_map"}
# In each of these pairs, one axis restricts the other.
_TIED = {
    *(("heads", "rows"), ("queries", "rows"), ("causality", "q_offset"), ("block_size", "keys")),
    *(("q_offset", "window_left"), ("q_offset", "window_right")),
    *(("q_offset", "seq_lens"), ("causality", "seq_lens")),
    *(("dims", "value_in_key"), ("dims", "kv_format"), ("kv_format", "value_in_key"), ("batch", "q_lens")),
    ("block_mask", "mask"),
}


def features(problem: Problem) -> dict[str, Any]:
    p = problem
    found: dict[str, Any] = {
        "heads": "equal" if p.q_heads == p.kv_heads else "one" if p.kv_heads == 1 else "grouped",
        "batch": p.batch > 1,
        "dims": (p.head_dim, p.value_dim),
        "keys": _size(p.kv_len, 32, 256),
        "queries": _size(p.q_len, 1, 8),
    }
    if p.is_decode:
        found["rows"] = row_class(p.q_heads // p.kv_heads * p.q_len)
    for field in fields(p):
        value = getattr(p, field.name)
        if field.name in _SIZES or (field.name in _OF_MASK and p.mask is None):
            continue
        if field.name in OPTIONS and p.op not in OPTIONS[field.name].ops:
            continue
        if field.name in ("layouts", "mask_broadcast"):
            found |= {f"{field.name}{i}": part for i, part in enumerate(value)}
        elif isinstance(value, tuple) and field.name != "block_mask":  # lengths
            found[field.name] = "some are 0" if 0 in value else "none is 0"
        elif field.name == "q_offset":
            # Beyond the keys and without a window the planner moves it, unless an option reads positions.
            moved = value is not None and value > p.kv_len and max(p.window_left, p.window_right) < 0
            found[field.name] = "moved" if moved else value is not None
        elif field.name == "scale":
            found[field.name] = value is not None
        else:
            found[field.name] = value
    return found


def row_class(packed_rows: int) -> int:
    """For decode: whether lanes have the rows of a key-value head (decode_vector), or one, two or more
    simdgroups."""
    return 3 if packed_rows <= 2 else 0 if packed_rows <= 8 else 1 if packed_rows <= 16 else 2


def types_for(
    rng: random.Random, seed: int, op: str, dims: int, packed_rows: int, formats: Sequence[str]
) -> tuple[int, str]:
    """Dtype, as a number, and format of the cache. A pipeline is compiled for these two, head dims, and rows.
    Any two of them occur together, but with one seed head dims and rows decide the others, because every
    combination would need many more pipelines, and compiling takes longer than running. Head dims of prefills
    have two of the dtypes, so that each row of the tuning tables is used."""
    other = row_class(packed_rows) if op in ("decode", "paged_decode") else rng.randint(0, 2) % 2
    kv_format = formats[(dims + 2 * other + seed // 3) % len(formats)]
    lacks_scales = rng.random() < 0.5  # drawn for every format, so that a new one changes nothing else
    if lacks_scales and (unscaled := f"{kv_format}_unscaled") in UNSCALED:  # the same pipeline
        kv_format = unscaled
    return (dims + 2 * other + seed) % 3, kv_format


def _size(n: int, small: int, middle: int) -> str:
    return "small" if n <= small else "middle" if n <= middle else "large"


def pairs(problem: Problem) -> set[Pair]:
    return {
        (problem.op, a, b)
        for a, b in itertools.combinations(sorted(features(problem).items(), key=lambda f: f[0]), 2)
        if (a[0], b[0]) not in _TIED
    }


def missing(problems: Iterable[Problem]) -> tuple[set[Pair], int]:
    """The pairs of features of an op that do not meet although each is there; and how many there are."""
    met: set[Pair] = set()
    values: dict[tuple[str, str], set[Any]] = defaultdict(set)
    for problem in problems:
        met |= pairs(problem)
        for axis, value in features(problem).items():
            values[problem.op, axis].add(value)
    possible = {
        (op, (a, x), (b, y))
        for op, a, b in {(op, a[0], b[0]) for op, a, b in met}
        for x, y in itertools.product(values[op, a], values[op, b])
        if not (b.startswith("mask_") and (a, x is None) in (("mask", True), ("block_mask", False)))
    }
    return possible - met, len(possible)


class _Met:
    """Which features of an operator have met, as bits: a set of pairs would take ten times as long."""

    def __init__(self) -> None:
        self.numbers: dict[Feature, int] = {}
        self.met: list[int] = []  # with a feature
        self.values: dict[str, int] = defaultdict(int)  # of an axis
        self.tied: dict[str, int] = defaultdict(int)  # to an axis, with its own values

    def bits(self, found: dict[str, Any]) -> int:
        return sum(1 << self._number(feature) for feature in found.items())

    def _number(self, feature: Feature) -> int:
        if feature not in self.numbers:
            axis, number = feature[0], len(self.numbers)
            self.numbers[feature] = number
            self.met.append(0)
            self.values[axis] |= 1 << number
            ties = {other for pair in _TIED if axis in pair for other in pair}
            for other in ties | {axis}:
                self.tied[other] |= 1 << number
        return self.numbers[feature]

    def few(self) -> int:
        """The values of axes with few values."""
        return sum(values for values in self.values.values() if values.bit_count() <= FEW)

    def worth(self, found: dict[str, Any], bits: int, few: int) -> int:
        """Twice the number of pairs that have not met. One of two axes with few values counts three times,
        so that all of these are met in the end."""
        total = 0
        for feature in found.items():
            number = self.numbers[feature]
            new = bits & ~(self.met[number] | self.tied[feature[0]])
            total += new.bit_count()
            if few >> number & 1:
                total += 2 * (new & few).bit_count()
        return total

    def add(self, found: dict[str, Any], bits: int) -> None:
        for feature in found.items():
            self.met[self.numbers[feature]] |= bits


def choose(candidates: Iterable[Problem], of: int) -> Iterator[Problem]:
    """Picks from every `of` candidates of an op the one with the most new pairs."""
    states: dict[str, _Met] = defaultdict(_Met)
    waiting: dict[str, list[tuple[Problem, dict[str, Any], int]]] = defaultdict(list)
    for problem in candidates:
        found, state, same_op = features(problem), states[problem.op], waiting[problem.op]
        same_op.append((problem, found, state.bits(found)))
        if len(same_op) == of:
            few = state.few()
            worths = [state.worth(found, bits, few) for _, found, bits in same_op]
            best, found, bits = same_op[worths.index(max(worths))]
            state.add(found, bits)
            same_op.clear()
            yield best
