"""The lanes that take part in a simdgroup operation: in loops that lanes leave at different times, in member
functions, and for operations of every kind. test_random_programs.py has the other constructs.

Each kernel has a twin in Python: a generator per lane that yields the place of each operation and its
operand. A place is a hand-written tuple of branches and iterations in the order of the source. A model of the
simdgroup runs the twins: the unfinished lanes at the first place take part.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import pytest

from softmetal.simt import KernelError, Library

Place = tuple[int, ...]
Twin = Generator[tuple[Place, float], float, float]

HEAD = """#include <metal_stdlib>
using namespace metal;
#define KERNEL(NAME) kernel void NAME(device float* o [[buffer(0)]], uint t [[thread_index_in_threadgroup]])
float two_steps(float x) { float a = simd_sum(x); return a * 100 + simd_sum(1.0f); }
struct Adder {
  float x;
  float total() thread { return simd_sum(x); }
  float operator()(float y) thread { return simd_sum(x + y); }
  float operator+(float y) const thread { return simd_sum(x * y); }
};
"""

CASES: dict[str, tuple[str, Callable[[int], Twin]]] = {}


def case(body: str) -> Callable[[Callable[[int], Twin]], Callable[[int], Twin]]:
    def add(twin: Callable[[int], Twin]) -> Callable[[int], Twin]:
        CASES[twin.__name__] = (body, twin)
        return twin

    return add


@case("o[t] = t < 16 ? simd_sum(1.0f) : simd_sum(2.0f);")
def ternary(t: int) -> Twin:
    return (yield (0,), 1) if t < 16 else (yield (1,), 2)


@case("""float s = 0;
  for (uint i = 0; i < 5; i++) if (t >> i & 1) s = s * 32 + simd_sum(1.0f);
  o[t] = s;""")
def skipped_iterations(t: int) -> Twin:
    s = 0.0
    for i in range(5):
        if t >> i & 1:
            s = s * 32 + (yield (i,), 1)
    return s


@case("""float s = 0;
  for (uint i = 0;; i++) { if (i == t % 4) { s = simd_sum(1.0f); break; } }
  o[t] = s * 100 + simd_sum(1.0f);""")
def before_a_break(t: int) -> Twin:
    s = yield (0, t % 4), 1
    return s * 100 + (yield (1,), 1)


@case("""float s = 0; uint i = 0;
  while (true) { if (i < t % 4) { i++; continue; } s = simd_sum(1.0f); break; }
  o[t] = s * 100 + simd_sum(1.0f);""")
def retried(t: int) -> Twin:
    s = yield (0, t % 4), 1
    return s * 100 + (yield (1,), 1)


@case("""for (uint i = 0;; i++) { if (i == t % 4) { o[t] = simd_sum(1.0f); return; }
  if (t + i > 40) break; } o[t] = simd_sum(2.0f);""")
def return_in_a_loop(t: int) -> Twin:
    for i in range(99):
        if i == t % 4:
            return (yield (0, i), 1)
        if t + i > 40:
            break
    return (yield (1,), 2)


@case("""float s = 0;
  for (uint i = 0; i < 3; i++) {
    if (t % 3 == i) continue;
    for (uint j = 0; j <= (t + i) % 2; j++) s = s * 32 + simd_sum(1.0f);
  }
  o[t] = s;""")
def nested_loops(t: int) -> Twin:
    s = 0.0
    for i in range(3):
        if t % 3 == i:
            continue
        for j in range((t + i) % 2 + 1):
            s = s * 32 + (yield (i, j), 1)
    return s


@case("""float s = 0;
  for (uint i = 0; i < 4; i++) {
    if (t % 4 == i) { for (uint j = 0; j < t / 8; j++) s = s * 32 + simd_sum(1.0f); break; }
  }
  o[t] = s;""")
def loop_before_a_break(t: int) -> Twin:
    s = 0.0
    for j in range(t // 8):
        s = s * 32 + (yield (t % 4, j), 1)
    return s


@case("""Adder a = {1};
  o[t] = t < 4 ? a.total() : t < 8 ? a.total() + 100 : t < 16 ? a(1) : a + 3;""")
def members_and_operators(t: int) -> Twin:
    if t < 4:
        return (yield (0,), 1)
    if t < 8:
        return 100 + (yield (1,), 1)
    return (yield (2,), 2) if t < 16 else (yield (3,), 3)


@case("""float s = 0; for (uint i = 0; i < 3; i++) s += t % 3 == i ? two_steps(1) : 0;
  o[t] = s + two_steps(2);""")
def calls_in_a_loop(t: int) -> Twin:
    a = yield (0, t % 3, 0), 1
    b = yield (0, t % 3, 1), 1
    c = yield (1, 0), 2
    return a * 100 + b + c * 100 + (yield (1, 1), 1)


def model(twin: Callable[[int], Twin]) -> list[float]:
    """The results of 32 lanes."""
    lanes, waiting, results = [twin(t) for t in range(32)], {}, [0.0] * 32

    def go_on(lane: int, value: float | None) -> None:
        try:
            waiting[lane] = lanes[lane].send(value)  # type: ignore[arg-type]
        except StopIteration as end:
            results[lane] = end.value

    for lane in range(32):
        go_on(lane, None)
    while waiting:
        first = min(place for place, _ in waiting.values())
        active = {lane: operand for lane, (place, operand) in waiting.items() if place == first}
        for lane in active:
            del waiting[lane]
        for lane in active:
            go_on(lane, sum(active.values()))
    return results


@pytest.fixture(scope="module")
def library() -> Library:
    return Library(
        HEAD + "".join(f"KERNEL({name}) {{ {body} }}\n" for name, (body, _) in CASES.items()) + MORE
    )


def run(library: Library, name: str, threads: int = 32, **options: Any) -> list[float]:
    out = np.zeros(64, np.float32)
    library.pipeline(name).run([out], (1, 1, 1), (threads, 1, 1), **options)
    return out.tolist()[:threads]


ORDERS = ["forward", "reverse", "random:1", "random:2"]


@pytest.mark.parametrize("checks", ["", "race,bounds,uninit"], ids=["fast", "checked"])
@pytest.mark.parametrize("name", CASES)
def test_lanes_that_take_part(library: Library, name: str, checks: str) -> None:
    expected = model(CASES[name][1])
    for order in ORDERS:
        assert run(library, name, order=order, checks=checks) == expected, order


def test_the_model_detects_wrong_participation() -> None:
    """Control: the model detects merged branches of a conditional."""

    def merged(t: int) -> Twin:
        return (yield (0,), 1) if t < 16 else (yield (0,), 2)

    assert model(merged) == [48.0] * 32
    assert model(CASES["ternary"][1]) == [16.0] * 16 + [32.0] * 16


# ---- operations of other kinds in divergent flow

MORE = """
KERNEL(votes) {
  if (t % 3 == 1) {
    ulong active = (ulong)simd_active_threads_mask(), vote = (ulong)simd_ballot(t > 15);
    o[t] = popcount(active) * 100 + popcount(vote) + 1000 * simd_is_first();
    o[t] += 2000 * simd_any(t == 1) + 4000 * simd_all(t > 0);
  }
}
KERNEL(scans) { if (t & 1) o[t] = simd_prefix_exclusive_sum(1.0f) * 100 + simd_broadcast_first(float(t)); }
KERNEL(shuffle_within) { if (t < 16) o[t] = simd_shuffle_xor(float(t), 1) + simd_shuffle_up(float(t), 0); }
KERNEL(shuffle_out_of_the_simdgroup) { o[t] = simd_shuffle_down(float(t), 1) + simd_shuffle_up(float(t), 1); }
KERNEL(shuffle_from_outside) {
  if (t < 16) o[t] = simd_shuffle_xor(float(t), 16);
}
KERNEL(fill_within) { if (t < 16) o[t] = simd_shuffle_and_fill_down(float(t), -1.0f, 1, 16); }
KERNEL(fill_from_outside) {
  if (t < 15) o[t] = simd_shuffle_and_fill_down(float(t), -1.0f, 1, 16);
}
KERNEL(quad_within) {
  if (t < 16) o[t] = quad_shuffle_up(float(t), 1) + quad_shuffle_rotate_down(float(t), 1);
}
KERNEL(quad_up_from_outside) { if (t % 4 != 1) o[t] = quad_shuffle_up(float(t), 1); }
KERNEL(quad_rotated_from_outside) { if (t % 4) o[t] = quad_shuffle_rotate_down(float(t), 1); }
KERNEL(broadcast_from_outside) {
  if (t > 0) o[t] = simd_broadcast(float(t), 0);
}
"""


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("checks", ["", "race"])
def test_votes_and_scans_are_of_the_active_lanes(library: Library, order: str, checks: str) -> None:
    active = range(1, 32, 3)
    votes = sum(t > 15 for t in active)
    expected = [
        len(active) * 100 + votes + 1000 * (t == 1) + 2000 + 4000 if t in active else 0 for t in range(32)
    ]
    assert run(library, "votes", order=order, checks=checks) == expected
    expected = [t // 2 * 100 + 1 if t % 2 else 0 for t in range(32)]
    assert run(library, "scans", order=order, checks=checks) == expected


@pytest.mark.parametrize("checks", ["", "race"])
def test_shuffles_among_active_lanes(library: Library, checks: str) -> None:
    expected = [(t ^ 1) + t if t < 16 else 0 for t in range(32)]
    assert run(library, "shuffle_within", checks=checks) == expected
    expected = [min(t + 1, 31) + max(t - 1, 0) for t in range(32)]
    assert run(library, "shuffle_out_of_the_simdgroup", checks=checks) == expected
    expected = [t - (t % 4 > 0) + (t + 1 if t % 4 < 3 else t - 3) if t < 16 else 0 for t in range(32)]
    assert run(library, "quad_within", checks=checks) == expected
    assert run(library, "fill_within", checks=checks) == [*range(1, 16), -1, *[0] * 16]


@pytest.mark.parametrize(
    ("name", "source", "reader"),
    [
        ("shuffle_from_outside", 16, 0), ("fill_from_outside", 15, 14), ("broadcast_from_outside", 0, 1),
        ("quad_up_from_outside", 29, 2), ("quad_rotated_from_outside", 28, 3),
    ],
)  # fmt: skip
def test_a_value_of_an_inactive_lane_is_undefined(
    library: Library, name: str, source: int, reader: int
) -> None:
    own = run(library, name)
    assert own[reader] == reader  # without checks: the lane's own
    with pytest.raises(KernelError) as caught:
        run(library, name, checks="race")
    text = str(caught.value)
    assert text.startswith(f"undefined: kernel '{name}': the simdgroup operation at kernel.metal:")
    assert f"gives lane {reader} of simdgroup 0" in text and "which takes no part in it" in text
    if name.startswith(("fill", "broadcast")):  # in the other operations each lane has its own source
        assert f"the value of lane {source}," in text
