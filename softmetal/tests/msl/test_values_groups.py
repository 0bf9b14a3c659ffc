"""Operations of simdgroups and quadgroups, compared with numpy on arrays with a row for each group."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from elementwise import TYPES, check_kernel, run

X = np.random.default_rng(7).integers(1, 8, 32)
LANES = np.arange(32)
Oracle = Callable[[np.ndarray], np.ndarray]


def first(x: np.ndarray, where: int, filled: bool) -> np.ndarray:
    """The rows shifted by one, up if `where` is 0: at their ends the own value, or -x of the other end."""
    shifted = np.roll(x, -1 if where else 1, 1)
    shifted[:, where] = -shifted[:, where] if filled else x[:, where]
    return shifted


# {group} is simd or quad, {n} the number of lanes of the group. Powers of two multiply exactly. Votes and
# operations on bits are in simt/random_programs.py.
OPERATIONS: dict[str, Oracle] = {
    "{group}_sum(x)": lambda x: x.sum(1, keepdims=True),
    "{group}_max(x)": lambda x: x.max(1, keepdims=True),
    "{group}_min(x)": lambda x: x.min(1, keepdims=True),
    "{group}_product(x > 4 ? 2 * one : one)": lambda x: 2 ** (x > 4).sum(1, keepdims=True),
    "{group}_prefix_inclusive_sum(x)": lambda x: x.cumsum(1),
    "{group}_prefix_exclusive_sum(x)": lambda x: x.cumsum(1) - x,
    "{group}_prefix_inclusive_product(x > 4 ? 2 * one : one)": lambda x: 2 ** (x > 4).cumsum(1),
    "{group}_prefix_exclusive_product(x > 4 ? 2 * one : one)": lambda x: 2 ** ((x > 4).cumsum(1) - (x > 4)),
    "{group}_broadcast_first(x)": lambda x: x[:, :1],
    "{group}_broadcast(x, 2)": lambda x: x[:, 2:3],
    "{group}_shuffle(x, {n} - 1 - lane % {n})": lambda x: x[:, ::-1],
    "{group}_shuffle_xor(x, 1)": lambda x: x.reshape(-1, 2)[:, ::-1].reshape(x.shape),
    "{group}_shuffle_up(x, 1)": lambda x: first(x, 0, filled=False),
    "{group}_shuffle_down(x, 1)": lambda x: first(x, -1, filled=False),
    "{group}_shuffle_rotate_up(x, 1)": lambda x: np.roll(x, 1, 1),
    "{group}_shuffle_rotate_down(x, 1)": lambda x: np.roll(x, -1, 1),
    "{group}_shuffle_and_fill_up(x, -x, 1)": lambda x: first(x, 0, filled=True),
    "{group}_shuffle_and_fill_down(x, -x, 1)": lambda x: first(x, -1, filled=True),
}
# Within runs of {n} lanes.
OF_RUNS: dict[str, Oracle] = {
    "{group}_shuffle_and_fill_up(x, -x, 1, {n})": lambda x: first(x, 0, filled=True),
    "{group}_shuffle_and_fill_down(x, -x, 1, {n})": lambda x: first(x, -1, filled=True),
}


@pytest.mark.parametrize("kind", ["float", "half", "int"])
def test_values(kind: str) -> None:
    groups = [("simd", 32, OPERATIONS), ("quad", 4, OPERATIONS), ("simd", 8, OF_RUNS), ("quad", 2, OF_RUNS)]
    expected = {
        text.format(group=group, n=n): np.broadcast_to(oracle(X.reshape(-1, n)), (32 // n, n)).ravel()
        for group, n, operations in groups
        for text, oracle in operations.items()
    }
    stores = "\n".join(f"out[{32 * i} + lane] = {text};" for i, text in enumerate(expected))
    out = np.zeros((len(expected), 32), np.float32)
    body = f"""kernel void k(device const {kind}* in, device float* out,
      ushort lane [[thread_index_in_simdgroup]]) {{ {kind} x = in[lane], one = 1; {stores} }}"""
    run(body, X.astype(TYPES[kind]), out, threads=32)
    for (text, values), got in zip(expected.items(), out, strict=True):
        np.testing.assert_array_equal(got, values, err_msg=text)


def test_vectors() -> None:
    body = """kernel void k(device float* out, ushort lane [[thread_index_in_simdgroup]]) {
      float x = lane;
      out[lane] = simd_sum(float4(x, 1, 2, 3)).x;
      out[32 + lane] = simd_max(half2(half(lane), 7.0h)).x;
      out[64 + lane] = simd_shuffle_xor(float2(x), 1).y;
      out[96 + lane] = simd_shuffle_and_fill_down(float4(x), float4(-x), 1).w;
    }"""
    check_kernel(body, [[496] * 32, [31] * 32, LANES ^ 1, [*range(1, 32), 0]], threads=32)
