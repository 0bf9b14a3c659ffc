"""Orders, partial simdgroups, divergence, limits and faults."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from softmetal.simt import KernelError, Library

SOURCE = """#include <metal_stdlib>
#include <metal_simdgroup_matrix>
using namespace metal;
#define INDEX uint l [[thread_index_in_threadgroup]]

kernel void trace(device uint* next [[buffer(0)]], device uint* o [[buffer(1)]], INDEX) {
  o[next[0]++] = l;
}
kernel void trace_after_barrier(device uint* next [[buffer(0)]], device uint* o [[buffer(1)]], INDEX) {
  threadgroup_barrier(mem_flags::mem_none);
  o[next[0]++] = l;
}
kernel void total(device float* o [[buffer(0)]], INDEX) { o[l] = simd_sum(float(l)); }
kernel void product(device float* o [[buffer(0)]], INDEX) {
  simdgroup_float8x8 a(2.0f), b(3.0f), c(1.0f);
  simdgroup_multiply_accumulate(c, a, b, c);
  simdgroup_store(c, o);
}
kernel void branched_product(device float* o [[buffer(0)]], INDEX) {
  simdgroup_float8x8 a(2.0f), b(3.0f), c(1.0f);
  if (l != 9)
    simdgroup_multiply_accumulate(c, a, b, c);
  simdgroup_store(c, o);
}
kernel void barrier_in_a_branch(device float* o [[buffer(0)]], INDEX) {
  if (l < 40)
    threadgroup_barrier(mem_flags::mem_threadgroup);
  o[l] = l;
}
kernel void two_barriers(device float* o [[buffer(0)]], INDEX) {
  if (l < 32) {
    threadgroup_barrier(mem_flags::mem_none);
    o[l] = 1;
  } else {
    o[l] = 2;
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
}
kernel void every_thread_at_both(device float* o [[buffer(0)]], INDEX) {
  for (uint i = 0; i < 2; i++) threadgroup_barrier(mem_flags::mem_none);
  if (l < 32) o[l] = 1;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  o[l] = 2;
}
kernel void other_iterations(device float* o [[buffer(0)]], INDEX) {
  for (uint i = 0; i < 2; i++)
    if (i == l / 32) threadgroup_barrier(mem_flags::mem_none);
  o[l] = l;
}
void wait() { threadgroup_barrier(mem_flags::mem_none); }
kernel void other_calls(device float* o [[buffer(0)]], INDEX) {
  if (l < 32) wait(); else wait();
  o[l] = l;
}
kernel void returned_before(device float* o [[buffer(0)]], INDEX) {
  if (l >= 32) return;
  threadgroup_barrier(mem_flags::mem_none);
  o[l] = l;
}
kernel void unequal_simdgroup_barriers(device float* o [[buffer(0)]], INDEX) {
  if (l % 2)
    simdgroup_barrier(mem_flags::mem_none);
  o[l] = simd_sum(1.0f);
}
kernel void too_much_memory(device float* o [[buffer(0)]], threadgroup float* a [[threadgroup(0)]], INDEX) {
  threadgroup float b[8000];
  b[l] = a[l];
  o[l] = b[l];
}
kernel void unbound(device float* o [[buffer(0)]], device float* p [[buffer(1)]], INDEX) {
  o[l] = 1;
  if (l == 5) p[l] = 2;
}
kernel void misaligned(device float4* o [[buffer(0)]], const device float* p [[buffer(1)]], INDEX) {
  threadgroup float a[64];
  for (uint i = 0; i < 4; i++) a[l * 4 + i] = 0.5f;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float4 half_of_one = *(threadgroup float4*)(a + 1);
  o[l] = *(const device float4*)(p + 1 + l * 4) + half_of_one;
}
kernel void deep(device int* o [[buffer(0)]], INDEX) {
  volatile int room[40000];
  for (int i = 0; i < 40000; i++) room[i] = i * o[0];
  o[l] = room[l];
}
kernel void scale(device float* o [[buffer(0)]], constant float& by [[buffer(1)]],
                  uint i [[thread_position_in_grid]]) {
  o[i] *= by;
}
kernel [[max_total_threads_per_threadgroup(64)]] void small(device float* o [[buffer(0)]], INDEX) {
  o[l] = 1;
}
"""


@pytest.fixture(scope="module")
def library() -> Library:
    return Library(SOURCE)


def run(
    library: Library, name: str, buffers: list, threads: int = 64, groups: int = 1, **options: Any
) -> dict:
    return library.pipeline(name).run(buffers, (groups, 1, 1), (threads, 1, 1), **options)


def error(library: Library, name: str, buffers: list, **options: Any) -> str:
    with pytest.raises(KernelError) as caught:
        run(library, name, buffers, **options)
    return str(caught.value)


def line_of(text: str) -> str:
    numbers = [i for i, line in enumerate(SOURCE.split("\n"), 1) if text in line]
    return f"kernel.metal:{numbers[0]}"


def trace(library: Library, name: str, order: str) -> list[int]:
    out = np.full(80, 99, np.uint32)
    run(library, name, [np.zeros(1, np.uint32), out], threads=80, order=order)
    return out.tolist()


@pytest.mark.parametrize("name", ["trace", "trace_after_barrier"])
def test_orders(library: Library, name: str) -> None:
    assert trace(library, name, "forward") == list(range(80))
    assert trace(library, name, "reverse") == list(range(79, -1, -1))
    shuffled = trace(library, name, "random:1")
    assert sorted(shuffled) == list(range(80)) != shuffled
    assert trace(library, name, "random:1") == shuffled != trace(library, name, "random:2")


@pytest.mark.parametrize("order", ["forward", "reverse", "random:1", "random:2"])
def test_partial_simdgroup(library: Library, order: str) -> None:
    out = np.zeros(48, np.float32)
    run(library, "total", [out], threads=48, order=order)
    assert (out[:32] == sum(range(32))).all() and (out[32:] == sum(range(32, 48))).all()
    run(library, "total", [out], threads=48, order=order, checks="race,bounds,uninit")


@pytest.mark.parametrize("checks", ["", "race"])
def test_products_need_every_lane(library: Library, checks: str) -> None:
    out = np.zeros(64, np.float32)
    run(library, "product", [out], threads=32, checks=checks)
    assert (out.reshape(8, 8) == 7 * np.eye(8)).all()
    text = error(library, "branched_product", [out], threads=32, checks=checks)
    assert (
        text.startswith("divergence: kernel 'branched_product': ")
        and "lanes 0-8, 10-31 of simdgroup 0" in text
    )
    text = error(library, "product", [out], threads=24, checks=checks)
    assert "lanes 24-31 do not exist" in text


@pytest.mark.parametrize("checks", ["", "race"])
@pytest.mark.parametrize("order", ["forward", "reverse", "random:1"])
def test_divergent_threadgroup_barriers(library: Library, order: str, checks: str) -> None:
    out = np.zeros(64, np.float32)
    text = error(library, "two_barriers", [out], order=order, checks=checks)
    first = SOURCE.split("\n").index("kernel void two_barriers(device float* o [[buffer(0)]], INDEX) {") + 1
    assert "two threadgroup_barriers at once" in text
    assert f"kernel.metal:{first + 2}" in text and f"kernel.metal:{first + 6}" in text
    for name in ("barrier_in_a_branch", "returned_before"):
        text = error(library, name, [out], order=order, checks=checks)
        assert "the threadgroup_barrier at kernel.metal:" in text and "returned" in text
    for name, line in (("other_iterations", "if (i == l / 32)"), ("other_calls", "void wait()")):
        text = error(library, name, [out], order=order, checks=checks)
        assert "two threadgroup_barriers at once" in text and text.count(line_of(line)) == 2
        assert "in another iteration of a loop or by another call" in text
    run(library, "every_thread_at_both", [out], order=order, checks=checks)
    assert (out == 2).all()


@pytest.mark.parametrize("checks", ["", "race"])
def test_divergent_simdgroup_barriers(library: Library, checks: str) -> None:
    text = error(library, "unequal_simdgroup_barriers", [np.zeros(32, np.float32)], threads=32, checks=checks)
    assert text.startswith("divergence: ") and "simdgroup" in text


def test_limits(library: Library) -> None:
    out = np.zeros(64, np.float32)
    run(library, "too_much_memory", [out], threadgroup_memory={0: 768})
    text = error(library, "too_much_memory", [out], threadgroup_memory={0: 784})
    assert text.startswith("limit: ") and "'b'" in text and "32784 bytes; the limit is 32768" in text
    assert "between 1 and 64 are possible" in error(library, "small", [out], threads=65)
    assert "between 1 and 1024 are possible" in error(library, "total", [out], threads=1025)


def test_faults_are_errors(library: Library) -> None:
    out = np.ones(64, np.float32)
    text = error(library, "unbound", [out, None])
    assert "invalid address 0x14 (a buffer that is not bound?)" in text and line_of("p[l] = 2") in text
    assert "thread (5,0,0)" in text
    assert "overrun of the thread's stack" in error(library, "deep", [np.zeros(64, np.int32)])
    run(library, "unbound", [out, out])  # the runtime still works


def test_vectors_may_lie_anywhere(library: Library) -> None:
    out = np.arange(65, dtype=np.float32)
    run(library, "misaligned", [out[1:], out], threads=4)
    assert out.tolist()[1:17] == [x + 0.5 for x in range(1, 17)]


def test_launches_from_several_threads(library: Library) -> None:
    arrays = [np.ones(64 * 50, np.float32) for _ in range(8)]
    pipeline = library.pipeline("scale")

    def work(array: np.ndarray, by: float) -> None:
        for _ in range(20):
            pipeline.run([array, np.float32(by).tobytes()], (50, 1, 1), (64, 1, 1), os_threads=2)

    with ThreadPoolExecutor(len(arrays)) as pool:
        list(pool.map(work, arrays, (1.0 + i / 64 for i in range(len(arrays)))))
    for i, array in enumerate(arrays):
        assert (array == array[0]).all() and abs(array[0] - (1 + i / 64) ** 20) < 1e-4
