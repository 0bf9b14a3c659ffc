"""Simdgroup operations in divergent flow: operators of a class, shuffles from inactive lanes.

test_random_programs.py has the other operations, and the control flow.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from softmetal.simt import KernelError, Library

SOURCE = """#include <metal_stdlib>
using namespace metal;
#define KERNEL(NAME) kernel void NAME(device float* o [[buffer(0)]], uint t [[thread_index_in_threadgroup]])
struct Adder {
  float x;
  float total() thread { return simd_sum(x); }
  float operator()(float y) thread { return simd_sum(x + y); }
  float operator+(float y) const thread { return simd_sum(x * y); }
};
KERNEL(operators) {
  Adder a = {1};
  o[t] = t < 4 ? a.total() : t < 8 ? a.total() + 100 : t < 16 ? a(1) : a + 3;
}
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


@pytest.fixture(scope="module")
def library() -> Library:
    return Library(SOURCE)


def run(library: Library, name: str, threads: int = 32, **options: Any) -> list[float]:
    out = np.zeros(64, np.float32)
    library.pipeline(name).run([out], (1, 1, 1), (threads, 1, 1), **options)
    return out.tolist()[:threads]


ORDERS = ["forward", "reverse", "random:1", "random:2"]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("checks", ["", "race,bounds,uninit"], ids=["fast", "checked"])
def test_calls_of_members_and_operators(library: Library, order: str, checks: str) -> None:
    expected = [4] * 4 + [104] * 4 + [16] * 8 + [48] * 16
    assert run(library, "operators", order=order, checks=checks) == expected


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
