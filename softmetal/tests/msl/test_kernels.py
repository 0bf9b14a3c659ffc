"""Kernel functions: arguments, attributes, names, limits, function constants, and the module's table."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np

from softmetal.msl.compile import Program, compile_program
from softmetal.simt.harness import Library, _Argument, _Loaded

PRELUDE = "#include <metal_stdlib>\nusing namespace metal;\n"


def describe(path: Path, name: str, constants: dict[int, bool | int | float] | None = None) -> dict:
    loaded = _Loaded(path, constants or {})  # unloads the module and its table when it is destroyed
    kernel = loaded.kernels[name]
    rows = ctypes.cast(kernel.arguments, ctypes.POINTER(_Argument))
    arguments = [
        (rows[i].name.decode(), rows[i].kind, rows[i].index, rows[i].used)
        for i in range(kernel.argument_count)
    ]
    return {
        "arguments": arguments,
        "max_threads": kernel.max_threads,
        "threadgroup_bytes": kernel.threadgroup_bytes,
    }


def compiled(source: str, tmp_path: Path, only: str | None = None) -> Path:
    return compile_program(Program(PRELUDE + source, only=only), "fast", tmp_path)


def test_argument_kinds_and_indices(tmp_path: Path) -> None:
    path = compiled(
        """
        struct P { int n; };
        kernel void k(device float* a, const device half4* b [[buffer(0)]], constant P& c [[buffer(1 + 2)]],
                      device P& d, threadgroup float* e [[threadgroup(2)]], constant float* f,
                      uint i [[thread_position_in_grid]]) {}
        """,
        tmp_path,
    )
    assert describe(path, "k")["arguments"] == [
        ("a", 0, 1, 1), ("b", 1, 0, 1), ("c", 2, 3, 1), ("d", 0, 2, 1), ("e", 3, 2, 1), ("f", 2, 4, 1),
    ]  # fmt: skip


def test_names_and_templates(tmp_path: Path) -> None:
    path = compiled(
        """
        template <typename T> struct Box { T x; };
        template <typename T, int n = 2> kernel void f(device T* x) {}
        template <typename T> [[kernel, max_total_threads_per_threadgroup(64)]] void g(device T* x) {}
        template [[host_name("f_" "float")]] [[kernel]] void f<float>(device float* x);
        template [[host_name("f_box")]] kernel void f<Box<Box<int>>, 4>(device Box<Box<int>>* x);
        template [[host_name("g_half")]] [[kernel]] decltype(g<half>) g<half>;
        [[host_name("renamed")]] kernel void h(device float* x) {}
        namespace inner { kernel void deep(device float* x) {}
          template <typename T> kernel void t(device T* x) {}
          template [[host_name("inner_t")]] kernel void t<float>(device float*); }
        template [[host_name("outer_t")]] kernel void inner::t<half>(device half*);
        """,
        tmp_path,
    )
    names = {"f_float", "f_box", "g_half", "renamed", "inner::deep", "inner_t", "outer_t"}
    assert set(_Loaded(path, {}).kernels) == names


def test_limits_follow_template_arguments(tmp_path: Path) -> None:
    path = compiled(
        """
        template <typename T, int n>
        [[kernel, max_total_threads_per_threadgroup(n * 32)]]
        void f(device T* x, uint i [[thread_index_in_threadgroup]]) {
          constexpr short pad = 16 / sizeof(T);
          using Row = vec<T, 4>;
          threadgroup T tile[n * (8 + pad)];
          const uint other = i + 1;
          {
            constexpr int pad = 2;
            threadgroup Row rows[pad][3], one;
            rows[0][0] = one;
          }
          tile[i] = x[other];
        }
        template [[host_name("half4")]] kernel void f<half, 4>(device half*, uint);
        template [[host_name("float2")]] kernel void f<float, 2>(device float*, uint);
        """,
        tmp_path,
    )
    half4, float2 = describe(path, "half4"), describe(path, "float2")
    assert (half4["max_threads"], float2["max_threads"]) == (128, 64)
    assert half4["threadgroup_bytes"] == 4 * 16 * 2 + 6 * 8 + 8 + 8  # the last 8 round it to a multiple of 16
    assert float2["threadgroup_bytes"] == 2 * 12 * 4 + 6 * 16 + 16


def test_only_limits_what_is_exported(tmp_path: Path) -> None:
    source = "kernel void first(device int* x) {}\nkernel void second(device int* x) {}\n"
    assert set(_Loaded(compiled(source, tmp_path, only="sec"), {}).kernels) == {"second"}


ATTRIBUTES = (
    PRELUDE
    + """
kernel void k(device uint* out, uint3 grid [[threads_per_grid]], uint3 at [[thread_position_in_grid]],
              ushort3 local [[thread_position_in_threadgroup]], uint3 size [[threads_per_threadgroup]],
              uint3 group [[threadgroup_position_in_grid]], uint3 groups [[threadgroups_per_grid]],
              uint index [[thread_index_in_threadgroup]], ushort lane [[thread_index_in_simdgroup]],
              uint simdgroup [[simdgroup_index_in_threadgroup]],
              uint simdgroups [[simdgroups_per_threadgroup]],
              uint width [[threads_per_simdgroup]], uint quad [[quadgroup_index_in_threadgroup]],
              ushort quad_lane [[thread_index_in_quadgroup]]) {
  uint place = at.y * grid.x + at.x;
  device uint* o = out + place * 8;
  o[0] = local.x + 100 * local.y;
  o[1] = size.x + 100 * size.y;
  o[2] = group.x + 100 * group.y;
  o[3] = groups.x + 100 * groups.y;
  o[4] = index;
  o[5] = lane + 100 * simdgroup;
  o[6] = simdgroups + 100 * width;
  o[7] = quad + 100 * quad_lane;
}
"""
)


def test_thread_attributes() -> None:
    out = np.zeros((6, 48, 8), np.uint32)  # 2x3 threadgroups of 24x2 threads
    Library(ATTRIBUTES).pipeline("k").run([out], grid=(2, 3, 1), threads=(24, 2, 1))
    out = out.reshape(6, 48, 8)
    y, x = np.mgrid[:6, :48]
    index = y % 2 * 24 + x % 24
    expected = [
        x % 24 + 100 * (y % 2), np.full_like(x, 224), x // 24 + 100 * (y // 2), np.full_like(x, 302), index,
        index % 32 + 100 * (index // 32), np.full_like(x, 3202), index // 4 + 100 * (index % 4),
    ]  # fmt: skip
    np.testing.assert_array_equal(out, np.stack(expected, -1))


CONSTANTS = (
    PRELUDE
    + """
constant bool flag [[function_constant(0)]];
constant int number [[function_constant(1)]];
constant float scale [[function_constant(2)]];
constant ushort small [[function_constant(1 + 2)]];
constant uint optional [[function_constant(4)]];
constant bool has_optional = is_function_constant_defined(optional);
constant uint chosen = has_optional ? optional : 7;
constant bool both = flag && has_optional;
kernel void k(device float* out, device float* extra [[buffer(1), function_constant(flag)]],
              constant int& missing [[buffer(2), function_constant(both)]]) {
  out[0] = flag;
  out[1] = number;
  out[2] = scale;
  out[3] = small;
  out[4] = chosen;
  if (flag) out[5] = extra[0];
  if (both) out[6] = missing;
}
"""
)


def test_function_constants() -> None:
    """They belong to their pipeline: two of one library take turns."""
    library, extra = Library(CONSTANTS), np.full(1, 5, np.float32)
    first = library.pipeline("k", {0: True, 1: -3, 2: 0.25, 3: 9})
    second = library.pipeline("k", {0: False, 1: 4, 2: 1.5, 3: 1, 4: 8})
    for pipeline, buffers, expected in (
        (first, [extra], [1, -3, 0.25, 9, 7, 5, -1]),
        (second, [], [0, 4, 1.5, 1, 8, -1, -1]),
        (first, [extra], [1, -3, 0.25, 9, 7, 5, -1]),
    ):
        out = np.full(7, -1, np.float32)
        pipeline.run([out, *buffers], grid=(1, 1, 1), threads=(1, 1, 1))
        np.testing.assert_array_equal(out, expected)


def test_indices_of_function_constants_may_be_any_constant_expression() -> None:
    source = """#include <metal_stdlib>
using namespace metal;
#define BASE 400
enum Indices { kSecond = BASE / 8 };
constant int first [[function_constant(BASE + 22)]];
constant bool second [[function_constant(kSecond)]];
kernel void k(device int* out) { out[0] = second ? first : -first; }
"""
    library, out = Library(source), np.zeros(1, np.int32)
    assert library.function_constants() == {"first": 422, "second": 50}
    library.pipeline("k", {422: 7, 50: False}).run([out], grid=(1, 1, 1), threads=(1, 1, 1))
    assert out[0] == -7


def test_gates_show_in_the_table(tmp_path: Path) -> None:
    path = compile_program(Program(CONSTANTS), "fast", tmp_path)
    used = {
        flag: [row[3] for row in describe(path, "k", {0: flag, 4: 1})["arguments"]] for flag in (True, False)
    }
    assert used == {True: [1, 1, 1], False: [1, 0, 0]}


THREADGROUP = (
    PRELUDE
    + """
template <int N> float last(threadgroup half (&halves)[N]) { return halves[N - 1]; }
kernel void k(device float* out, uint i [[thread_index_in_threadgroup]]) {
  threadgroup float rows[4][8], total;
  threadgroup alignas(16) half halves[32];
  rows[i / 8][i % 8] = i;
  halves[i] = half(i);
  if (i == 0) total = 100;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  threadgroup float* flat = &rows[0][0];
  threadgroup half4& chunk = *(threadgroup half4*)(halves + 4 * (i / 4));
  out[i] = flat[31 - i] + total + float(chunk.y) + last(halves);
}
"""
)


def test_threadgroup_variables() -> None:
    out = np.zeros(32, np.float32)
    Library(THREADGROUP).pipeline("k").run([out], grid=(1, 1, 1), threads=(32, 1, 1))
    lane = np.arange(32)
    np.testing.assert_array_equal(out, 31 - lane + 100 + lane // 4 * 4 + 1 + 31)
