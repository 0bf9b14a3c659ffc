"""Idioms of code generators and kernel libraries give the same values as Metal."""

from __future__ import annotations

import numpy as np
import pytest
from elementwise import PRELUDE, check_kernel, run

from softmetal.msl.compile import CompileError, Program, compile_program
from softmetal.simt.harness import Library


@pytest.mark.parametrize("element", ["float", "half", "int", "uchar"])
def test_packed_vectors_of_three(element: str) -> None:
    kinds = {"float": np.float32, "half": np.float16, "int": np.int32, "uchar": np.uint8}
    values = np.array([1, 2, 3, 4, 5, 6], kinds[element])
    body = f"""
    kernel void k(device packed_{element}3* a, constant packed_{element}3& c) {{
      a[0] += c;
      a[0] *= {element}(2);
      a[1] -= {element}3(1, 2, 3);
      a[1][2] = a[0][1];
      a[1] /= packed_{element}3(3, 3, 4);
    }}
    """
    run(body, values, np.array([10, 20, 30], kinds[element]))
    second = np.array([3 / 3, 3 / 3, 44 / 4], kinds[element])
    np.testing.assert_array_equal(values, [22, 44, 66, *second])


@pytest.mark.parametrize(("attribute", "size"), [("__attribute__((aligned({})))", 16), ("alignas({})", 64)])
def test_aligned_threadgroup_variables(attribute: str, size: int) -> None:
    text = attribute.format(size)
    after = text if attribute.startswith("_") else ""
    body = f"""
    kernel void k(device uint* out) {{
      threadgroup char odd[3];
      threadgroup {text} float a[5];
      threadgroup float b[2][3] {after};
      odd[0] = 1;
      a[4] = 2;
      b[1][2] = 3;
      out[0] = uint(ulong(&a[0]) % {size});
      out[1] = uint(a[4] + b[1][2] + odd[0]);
    }}
    """
    check_kernel(body, [0, 6], kind=np.uint32)


def test_parameters_that_are_arrays_of_arrays() -> None:
    body = """
    float at(threadgroup float t[4][8], const float w[2][2], constant float c[][2], uint i, uint j) {
      return t[i][j] + w[1][0] + c[i][1];
    }
    kernel void k(device float* out, constant float (&c)[4][2], uint i [[thread_index_in_threadgroup]]) {
      threadgroup float tile[4][8];
      tile[i / 8][i % 8] = i;
      threadgroup_barrier(mem_flags::mem_threadgroup);
      float w[2][2] = {{1, 2}, {100, 4}};
      out[i] = at(tile, w, c, 3 - i / 8, i % 8);
    }
    """
    out = np.zeros(32, np.float32)
    c = np.arange(8, dtype=np.float32) * 1000
    run(body, out, c, threads=32)
    i = np.arange(32)
    np.testing.assert_array_equal(out, (3 - i // 8) * 8 + i % 8 + 100 + c[(3 - i // 8) * 2 + 1])


STRUCTS = """
struct Pair { float a, b; };
constant constexpr Pair first = {1, 2};
Pair made(float x) { return {x, x + 1}; }
"""


def test_conditional_expressions_of_structs_in_two_spaces() -> None:
    body = """
    kernel void k(device Pair* out, device float* q, uint i [[thread_index_in_threadgroup]]) {
      threadgroup Pair shared[4];
      shared[i] = made(10 * i);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      out[i] = i % 2 ? shared[3 - i] : first;
      out[4 + i] = i == 0 ? made(7) : i == 1 ? first : i == 2 ? shared[2] : out[0];
      device float& chosen = i < 2 ? q[i] : q[4 + i];
      chosen = i;
      (i < 2 ? q[8] : q[9]) = 5;
    }
    """
    out, q = np.zeros((8, 2), np.float32), np.full(10, -1, np.float32)
    run(STRUCTS + body, out, q, threads=4)
    expected = [(1, 2), (20, 21), (1, 2), (0, 1), (7, 8), (1, 2), (20, 21), (1, 2)]
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(q, [0, 1, -1, -1, -1, -1, 2, 3, 5, 5])


def test_values_that_convert_to_any_type() -> None:
    """naga reads out of bounds and divides this way."""
    body = """
    struct Default { template <typename T> operator T() && { return T {}; } };
    float read(uint i, device float const* a, uint n) { return i < n ? a[i] : Default(); }
    metal::int2 divided(metal::int2 a, metal::int2 b) {
      return a / metal::select(b, 1, (a == (-2147483647 - 1) & b == -1) | (b == 0));
    }
    kernel void k(device float const* a, device float* out, metal::uint i [[thread_index_in_threadgroup]]) {
      out[i] = read(i, a, 2) + divided(metal::int2(9, 7), metal::int2(2, i))[i & 1];
    }
    """
    check_kernel(body, [14, 27, 4, 2], np.array([10, 20, 30, 40], np.float32), threads=4)


def test_member_overloads_by_template() -> None:
    body = """
    struct Scan {
      template <typename T, enable_if_t<sizeof(T) < 8, bool> = true> T twice(T x) thread { return x + x; }
      template <typename T, enable_if_t<sizeof(T) == 8, bool> = true>
      T twice(T x) thread { return x * 2 + 1; }
      template <typename T> T both(T x) thread { return twice(x) + operator()(x); }
      template <typename T> T operator()(T x) thread { return x; }
    };
    kernel void k(device long* out) { Scan s; out[0] = s.both(5); out[1] = s.both(5l); }
    """
    check_kernel(body, [15, 16], kind=np.int64)


@pytest.mark.parametrize("std", ["metal3.2", "metal3.1"])
def test_logs_are_of_3_2(std: str) -> None:
    source = (
        "#include <metal_stdlib>\n#include <metal_logging>\nusing namespace metal;\n"
        'constant os_log own("com.example", "kernels");\n'
        'kernel void k(device float* x) { os_log_default.log("x %f", x[0]); own.log_error("bad"); }\n'
    )
    program = Program(source, std=std)
    if std == "metal3.2":
        compile_program(program, "fast")
    else:
        with pytest.raises(CompileError, match="os_log"):
            compile_program(program, "fast")


def test_kernels_named_as_library_functions() -> None:
    """Kernels are distinguished from library functions with the same name."""
    body = """
    kernel void log(device float* x) { x[0] = metal::log(x[0]) + 7; }
    template <typename T> kernel void dot(device T* x, device T* y) { y[0] = x[0] + 1; }
    template [[host_name("k")]] kernel void dot<float>(device float*, device float*);
    """
    x, y = np.ones(1, np.float32), np.zeros(1, np.float32)
    run(body, x, y)
    assert y[0] == 2
    run(body, x, kernel="log")
    assert x[0] == 7


def test_built_in_variables_at_program_scope() -> None:
    body = """
    uint2 place [[thread_position_in_grid]];
    ushort lane [[thread_index_in_simdgroup]];
    uint of_grid() { return place.x * 100 + lane; }
    kernel void k(device uint* out) { out[place.x] = of_grid(); }
    """
    index = np.arange(64)
    check_kernel(body, index * 100 + index % 32, kind=np.uint32, grid=2, threads=32)


def test_names_that_hide_a_built_in_at_program_scope() -> None:
    body = """
    uint tid [[thread_position_in_grid]];
    struct S { uint tid; uint get() const thread { return tid; } };
    template <typename T> T sum(T a) { return a + T(tid); }
    kernel void k(device uint* o) {
      S s{3};
      { uint tid = 4; if (s.get() == 3) o[tid] = 40; }
      for (uint tid = 5; tid < 7; tid++) o[tid] = tid;
      o[8 + tid] = s.get() + s.tid;
      o[16 + tid] = sum(tid);
    }
    """
    o = np.zeros(24, np.uint32)
    run(body, o, threads=8)
    assert o[4:8].tolist() == [40, 5, 6, 0]
    assert (o[8:16] == 6).all() and (o[16:] == 2 * np.arange(8)).all()


def test_each_instantiation_is_of_its_overload() -> None:
    body = """
    using I = float;
    template <int N> kernel void k(device float* x [[buffer(0)]]) { x[0] = N; }
    template <typename T> kernel void k(device T* x [[buffer(0)]]) { x[0] = T(1); }
    template <typename T> kernel void k(device T* x [[buffer(0)]], device int* y [[buffer(1)]]) { x[0] = 20; }
    template <typename T> kernel void k(device T* x [[buffer(0)]], device I* y [[buffer(1)]]) {
      threadgroup T shared[1];
      shared[0] = 30;
      x[0] = shared[0];
    }
    template [[host_name("number")]] kernel void k<4>(device float*);
    template [[host_name("type")]] kernel void k<float>(device float*);
    template [[host_name("ints")]] kernel void k<float>(device float* x, device int* y [[buffer(1)]]);
    template [[host_name("alias")]] kernel void k<float>(device float*, device I*);
    namespace a { template <typename T> kernel void k(device T* x [[buffer(0)]]) { x[0] = 5; } }
    namespace b {
      template <typename T> kernel void k(device T* x [[buffer(0)]]) { x[0] = 6; }
      template [[host_name("inside")]] kernel void k<float>(device float*);
    }
    template [[host_name("outside")]] kernel void a::k<float>(device float*);
    template <int N> struct Many { int n[N]; };
    template <typename T, int N> kernel void d(device T* x, constant Many<N>& m) { x[0] = 7 + N; }
    template [[host_name("deduced")]] kernel void d(device float* x [[buffer(0)]], constant Many<2>& m);
    template <typename T> kernel void e(device T* x [[buffer(0)]]) { x[0] = 9; }
    template <typename T, typename U> kernel void e(device T* x [[buffer(0)]], device U* y) { x[0] = 10; }
    template [[host_name("second")]] kernel void e(device float*, device int*);
    template [[host_name("listed")]] kernel decltype(e<float>) e<float>;
    [[host_name("p")]] kernel void plain(device float* x [[buffer(0)]]) { x[0] = 7; }
    [[host_name("q")]] kernel void plain(device float* x [[buffer(0)]], device float* y) { x[0] = 8; }
    """
    library = Library(PRELUDE + body)
    values = {
        "deduced": 9,
        "second": 10,
        "listed": 9,
        "number": 4,
        "type": 1,
        "ints": 20,
        "alias": 30,
        "inside": 6,
        "outside": 5,
        "p": 7,
        "q": 8,
    }
    for name, value in values.items():
        x = np.zeros(2, np.float32)
        library.pipeline(name).run([x, x], grid=(1, 1, 1), threads=(1, 1, 1))
        assert x[0] == value, name
