"""Checks of private arrays, of atomics and of overruns into other buffers, each with a correct twin."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from softmetal.simt import KernelError, Library

ALL = "race,bounds,uninit"

SOURCE = """#include <metal_stdlib>
using namespace metal;
#define INDEX uint l [[thread_index_in_threadgroup]]
#define OUT device float* o [[buffer(0)]]
#define COUNTERS device atomic_uint* c [[buffer(0)]]
#define FILLED float a[8]; for (uint i = 0; i < 8; i++) a[i] = i;

kernel void inside(OUT, INDEX) {
  FILLED
  o[l] = a[l % 8];
}
kernel void past_the_end(OUT, INDEX) {
  FILLED
  o[l] = a[l % 9];  // past_the_end
}
kernel void before_the_start(OUT, INDEX) {
  FILLED
  a[int(l % 8) - 1] = 3;  // before_the_start
  o[l] = a[l % 8];
}
kernel void row_of_a_matrix(OUT, INDEX) {
  float a[4][8];
  for (uint i = 0; i < 32; i++) a[i / 8][i % 8] = i;
  o[l] = a[l % 4][l % 10];  // row_of_a_matrix
}
struct Pair { float first[4]; float second[4]; };
kernel void member(OUT, INDEX) {
  Pair p;
  for (uint i = 0; i < 4; i++) p.first[i] = p.second[i] = i;
  o[l] = p.first[l % 5];  // member
}
kernel void by_pointer(OUT, INDEX) {
  FILLED
  thread float* p = a + l % 8;
  o[l] = p[1];  // by_pointer
}
float last(thread float* a, uint n) { return a[n - 1]; }
kernel void whole_array_by_pointer(OUT, INDEX) {
  FILLED
  thread float* end = &a[8];
  float s = 0;
  for (thread float* p = a; p != end; p++) s += *p;
  o[l] = s + last(a, 8);
}
kernel void inside_a_vector(OUT, INDEX) {
  float4 v = float4(l);
  o[l] = v[l % 4];
}
kernel void past_a_vector(OUT, INDEX) {
  float4 v = float4(l);
  o[l] = v[l % 5];  // past_a_vector
}
kernel void vector_written_outside(OUT, INDEX) {
  half3 v = half3(l);
  v[l % 4] = 2;  // vector_written_outside
  o[l] = v.x;
}
kernel void outside_a_vector_of_a_buffer(OUT, INDEX) {
  device float4* v = (device float4*)o;
  v[l / 4][l == 5 ? 4 : l % 4] = l;  // outside_a_vector_of_a_buffer
}
constant float table[4] = {1, 2, 3, 4};
kernel void inside_a_table(OUT, INDEX) { o[l] = table[l % 4]; }
kernel void past_a_table(OUT, INDEX) { o[l] = table[l % 5]; }  // past_a_table

kernel void element_without_a_value(OUT, INDEX) {
  float a[8];
  for (uint i = 0; i < 8; i++) if (i != 5) a[i] = i;
  o[l] = a[l % 8];  // element_without_a_value
}
kernel void lost_between_iterations(OUT, INDEX) {
  float s = 0;
  for (uint i = 0; i < 2; i++) {
    float a[4];
    if (i == 0) for (uint j = 0; j < 4; j++) a[j] = j;
    s += a[l % 4];  // lost_between_iterations
  }
  o[l] = s;
}
kernel void components(OUT, INDEX) {
  float4 v[2];
  for (uint i = 0; i < 2; i++) { v[i].x = i; v[i].y = 2; v[i].zw = float2(3, 4); }
  o[l] = dot(v[l % 2], float4(1));
}
kernel void one_component(OUT, INDEX) {
  float4 v[2];
  for (uint i = 0; i < 2; i++) v[i].x = i;
  o[l] = v[l % 2].x;
}
kernel void other_component(OUT, INDEX) {
  float4 v[2];
  for (uint i = 0; i < 2; i++) v[i].x = i;
  o[l] = v[l % 2].y;  // other_component
}
kernel void copied(OUT, INDEX) {
  Pair p, q;
  for (uint i = 0; i < 4; i++) p.first[i] = i;
  q = p;
  o[l] = q.first[l % 4];
}
kernel void from_the_library(OUT, INDEX) {
  float a[2];
  o[l] = modf(float(l) / 4, a[l % 2]) + a[l % 2];
}

kernel void atomics_only(COUNTERS, INDEX) {
  atomic_fetch_add_explicit(c, l, memory_order_relaxed);
  atomic_fetch_max_explicit(c, l, memory_order_relaxed);
  atomic_store_explicit(c + 1, atomic_load_explicit(c, memory_order_relaxed), memory_order_relaxed);
}
kernel void atomic_and_plain_read(COUNTERS, OUT_1, INDEX) {
  atomic_fetch_add_explicit(c, 1u, memory_order_relaxed);
  o[l] = ((device uint*)c)[0];  // atomic_and_plain_read
}
kernel void plain_write_and_atomic(COUNTERS, INDEX) {
  if (l == 7) ((device uint*)c)[0] = 5;
  atomic_fetch_add_explicit(c, 1u, memory_order_relaxed);  // plain_write_and_atomic
}
kernel void write_after_atomics(COUNTERS, INDEX) {
  atomic_fetch_add_explicit(c, 1u, memory_order_relaxed);
  if (l == 63) ((device uint*)c)[0] = 5;  // write_after_atomics
}
kernel void plain_behind_a_barrier(COUNTERS, OUT_1, INDEX) {
  if (l == 7) ((device uint*)c)[0] = 5;
  threadgroup_barrier(mem_flags::mem_device);
  atomic_fetch_add_explicit(c, 1u, memory_order_relaxed);
  threadgroup_barrier(mem_flags::mem_device);
  o[l] = ((device uint*)c)[0];
}
kernel void atomic_past_the_end(COUNTERS, INDEX) {
  atomic_fetch_add_explicit(c + l, 1u, memory_order_relaxed);  // atomic_past_the_end
}
kernel void atomic_without_a_value(OUT, INDEX) {
  threadgroup atomic_uint n[1];
  o[l] = atomic_fetch_add_explicit(n, 1u, memory_order_relaxed);  // atomic_without_a_value
}
kernel void atomic_with_a_value(OUT, INDEX) {
  threadgroup atomic_uint n[1];
  if (l == 0) atomic_store_explicit(n, 0u, memory_order_relaxed);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  o[l] = atomic_fetch_add_explicit(n, 1u, memory_order_relaxed);
}

kernel void far_off(OUT, const device float* q [[buffer(1)]], constant long& by [[buffer(2)]], INDEX) {
  o[l] = q[long(l) + by];  // far_off
}

#define READ_THEN_WRITE(name, group, other)                                                        \\
  kernel void name(OUT, INDEX) {                                                                   \\
    threadgroup float a[64];                                                                       \\
    a[l] = l;                                                                                      \\
    group##_barrier(mem_flags::mem_threadgroup);                                                   \\
    float x = a[other];                                                                            \\
    group##_barrier(mem_flags::mem_none);                                                          \\
    a[l] = x;                                                                                      \\
    o[l] = x;                                                                                      \\
  }
READ_THEN_WRITE(read_then_write, threadgroup, 63 - l)
READ_THEN_WRITE(read_then_write_in_a_simdgroup, simdgroup, l ^ 1)
kernel void write_then_read(OUT, INDEX) {
  threadgroup float a[64];
  a[l] = l;
  threadgroup_barrier(mem_flags::mem_none);
  o[l] = a[63 - l];  // write_then_read
}
""".replace("OUT_1", "device float* o [[buffer(1)]]")


@pytest.fixture(scope="module")
def library() -> Library:
    return Library(SOURCE, mode="checked")


def launch(library: Library, name: str, buffers: list | None = None, **options: Any) -> list[np.ndarray]:
    arrays = [np.zeros(64, np.float32), np.zeros(64, np.float32)] if buffers is None else buffers
    library.pipeline(name).run(arrays, (1, 1, 1), (64, 1, 1), checks=options.pop("checks", ALL), **options)
    return arrays


def finding(library: Library, name: str, buffers: list | None = None, **options: Any) -> str:
    with pytest.raises(KernelError) as caught:
        launch(library, name, buffers, **options)
    (line,) = (i for i, text in enumerate(SOURCE.split("\n"), 1) if f"// {name}" in text)
    first = caught.value.findings[0]
    assert f" at kernel.metal:{line} by thread (" in first, first
    return first


ORDERS = ["forward", "reverse", "random:3"]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "name",
    [
        "inside", "inside_a_vector", "whole_array_by_pointer", "inside_a_table", "components",
        "one_component", "copied", "from_the_library", "atomics_only", "plain_behind_a_barrier",
        "atomic_with_a_value", "read_then_write", "read_then_write_in_a_simdgroup",
    ],
)  # fmt: skip
def test_right_kernels_are_quiet(library: Library, name: str, order: str) -> None:
    launch(library, name, order=order)


def test_results_match_unchecked_kernels(library: Library) -> None:
    fast = Library(SOURCE)
    for name in ("inside", "whole_array_by_pointer", "components", "from_the_library", "read_then_write"):
        assert (launch(library, name)[0] == launch(fast, name, checks="")[0]).all(), name


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("past_the_end", "index 8 of private array 'a', where it has 8 elements"),
        ("before_the_start", "index -1 of private array 'a', where it has 8 elements"),
        ("row_of_a_matrix", "of private array 'a', where it has 8 elements"),
        ("member", "index 4 of private array 'p', where it has 4 elements"),
        ("by_pointer", "read of 4 bytes at byte 32 of variable 'a', which has 32 bytes"),
        ("past_a_vector", "index 4 of vector 'v', where it has 4 elements"),
        ("vector_written_outside", "index 3 of vector 'v', where it has 3 elements"),
        ("outside_a_vector_of_a_buffer", "where it has 4 elements"),
        ("past_a_table", "at byte 16 of variable 'table', which has 16 bytes"),
        ("atomic_past_the_end", "at byte 64 of buffer 0 'c', which has 64 bytes"),
    ],
)
def test_bounds(library: Library, name: str, words: str) -> None:
    text = finding(library, name, [np.zeros(16 if "atomic" in name else 64, np.float32)])
    assert text.startswith(f"bounds: kernel '{name}': ") and words in text


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("element_without_a_value", "byte 20 of private array 'a'"),
        ("lost_between_iterations", "of private array 'a'"),
        ("other_component", "byte 4 of private array 'v'"),
        ("atomic_without_a_value", "byte 0 of threadgroup array 'n'"),
    ],
)
def test_reads_of_uninitialised_values(library: Library, name: str, words: str) -> None:
    text = finding(library, name, checks="uninit")
    assert text.startswith(f"uninitialised: kernel '{name}': read of 4 bytes at ") and words in text
    launch(library, name, checks="bounds")


VARIABLES = """#include <metal_stdlib>
using namespace metal;
struct Sum { float4 of_columns; float total; int count; };
kernel void variables(device float* o [[buffer(0)]], device const float* x [[buffer(1)]]) {
  float sometimes;
  if (x[0] > 0) sometimes = 3;
  Sum sum;
  sum.of_columns = 1.0f;
#ifdef GIVEN
  sum.total = 4.0f;
  sum.count = 5;
#endif
  float each = 0;
  for (int i = 0; i < 2; i++) {
    float first;
    if (i == 0 || x[0] > 0) first = 6;
    each = each * 0 + first;
  }
  o[0] = sometimes;
  o[1] = sum.of_columns.x;
  o[2] = sum.total;
  o[3] = sum.count;
  o[4] = each;
}
"""


def test_variables_without_a_value_hold_ones() -> None:
    """NaN as a float, also in each iteration of a loop. Initialised variables are not reported."""
    given = Library(VARIABLES, mode="checked", defines={"GIVEN": "1"})
    assert launch(given, "variables", [np.zeros(5, np.float32), np.ones(1, np.float32)])[0].tolist() == [
        *(3, 1, 4, 5, 6)
    ]
    missing = Library(VARIABLES, mode="checked")
    found = launch(missing, "variables", [np.zeros(5, np.float32), np.zeros(1, np.float32)])[0]
    assert np.isnan(found).tolist() == [True, False, True, False, True]
    assert found[1] == 1 and found[3] == -1


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", ["atomic_and_plain_read", "write_after_atomics", "plain_write_and_atomic"])
def test_atomic_against_plain(library: Library, name: str, order: str) -> None:
    with pytest.raises(
        KernelError, match="race: .*( races with the .*atomic write|atomic write .* races with the )"
    ):
        launch(library, name, checks="race", order=order)


def test_only_reads_are_ordered_by_a_barrier_that_names_no_memory(library: Library) -> None:
    assert finding(library, "write_then_read", checks="race").startswith(
        "race: kernel 'write_then_read': read of"
    )


@pytest.mark.parametrize("by", [64, 100, -1, -70, 10**6, -(10**9), 2**40, -(2**40)])
def test_an_overrun_is_one_of_the_buffer_that_it_came_from(library: Library, by: int) -> None:
    """At any distance: here both buffers are adjacent in one array."""
    memory = np.zeros(256, np.float32)
    near, far = memory[:64], memory[64:128]
    for o, q in ((near, far), (far, near)):
        launch(library, "far_off", [o, q, np.int64(0).tobytes()])
        text = finding(library, "far_off", [o, q, np.int64(by).tobytes()], checks="bounds")
        assert f"read of 4 bytes at byte {4 * by} of buffer 1 'q', which has 256 bytes" in text
