"""Language and library features return the values that MSL defines."""

from __future__ import annotations

import struct

import numpy as np
from elementwise import UNWRITTEN, check, check_kernel, run


def test_literals_are_float() -> None:
    check(
        {
            "sizeof(1.0)": 4,
            "sizeof(1e3)": 4,
            "sizeof(1.5h)": 2,
            "1.0 / 3.0": np.float32(1) / np.float32(3),
            "1.5h": 1.5,
            "2.0bf": 2,
            "2.H + 4l + 5UL + 0x1eL + 0b101 + 'a'": 143,
        }
    )


def test_vector_constructors_and_swizzles() -> None:
    body = """
    template <typename T> T pair(float a, float b) { return T(a, b); }
    int compared(float4 a, float4 b) {
      bool4 m = a < b, n = b < a;
      float4 v(a > b);
      return any(m) + 2 * all(m) + int(m[0]) + 2 * n[3] + v.w + v.x;
    }
    float declared() {
      float4 v(1, float2(2, 3), 4), w(5);
      return v.x * 1000 + v.y * 100 + v.z * 10 + v.w + w.w;
    }
    float assigned() {
      float4 c = 1;
      c.xy = float2(2, 3);
      c.zw += c.xy;
      c = c.wzyx;
      c.rgb = 2 + c.bgr * 2;
      c[3] = 7;
      return c.x * 1000 + c.y * 100 + c.z * 10 + c.w;
    }
    """
    check(
        {
            "float4(1, 2, 3, 4).w": 4,
            "float4(float2(1, 2), float2(3, 4)).z": 3,
            "float4(1, float3(2, 3, 4).zyx).y": 4,
            "float3(7).z": 7,
            "metal::float2(1, 2).yx.x": 2,
            "vec<float, 3>(1, 2, 3).z": 3,
            "metal::vec<half, 4>(1, 2, 3, 4).wzyx.y": 3,
            "pair<float2>(5, 6).y": 6,
            "declared()": 1239,
            "assigned()": 8907,
            "float4{1, 2, 3, 4}.y": 2,
            "float2(float2(1, 5) < 2).x": 1,
            "int3(float3(1, 5, 2) > float3(0, 9, 1)).z": 1,
            "compared(float4(1, 2, 3, 4), float4(4, 3, 2, 1))": 5,
            "float2(1 < 2 ? 3 : 4, 5).x": 3,
        },
        body=body,
    )


def test_casts_convert_values() -> None:
    body = """
    template <typename T> float cast(float4 v) { return ((T)v).y; }
    template <typename T, typename U> T to(U u) { return static_cast<T>(u); }
    float implicitly(float x) { half h = x; h *= x; h += 1; return h; }
    """
    check(
        {
            "((int4)float4(1.5, 2.5, 3.5, 4.5)).y": 2,
            "((float4)int4(1, 2, 3, 4)).z": 3,
            "float(half4(float4(1.0, 2.0, 3.0, 2049.0)).w)": 2048,
            "cast<int4>(float4(0, 9.75, 0, 0))": 9,
            "to<int2>(float2(1.5, 2.5)).y": 2,
            "static_cast<float2>(int2(3, 4)).x": 3,
            "(float)(int)2.75": 2,
            "-(float)int(3) * 2": -6,
            "implicitly(3.5)": 13.25,
            "as_type<float>(0x40490fdbu)": np.float32(np.pi),
            "as_type<half2>(0x3c004000u).y": 1,
            "as_type<uint2>(ulong(0x100000002)).y": 1,
            "int(as_type<short2>(-65535).x)": 1,
        },
        body=body,
    )


def test_pointer_casts() -> None:
    source = """
    struct Pair { float a, b; };
    kernel void k(device float* in, device float* out, threadgroup float* scratch [[threadgroup(0)]]) {
      device float4* v = (device float4*)(in + 4);
      out[0] = (*(device float4*)(in + 4)).x + v[0].y;
      out[1] = ((device Pair*)in)[1].b;
      out[2] = *(const device float*)(device void*)(in + 2);
      *(threadgroup float2*)scratch = float2(8, 9);
      out[3] = scratch[1];
      out[4] = reinterpret_cast<device float2*>(in)[1].y;
      out[5] = float(*(const device uint*)in & 0xffu) + !(bool)in[0];
    }
    """
    values = np.arange(8, dtype=np.float32)
    check_kernel(source, [9, 3, 2, 9, 3, 1], values, threadgroup_memory={0: 64})


def test_packed_vectors() -> None:
    source = """
    struct Item { packed_float3 p; float w; packed_half2 h; };
    kernel void k(device const Item* in, device float* out) {
      float3 p = float3(in[1].p);
      out[0] = p.x + p.y * 10 + p.z * 100;
      out[1] = in[1].w;
      out[2] = in[1].h.y;
      out[3] = sizeof(Item) + sizeof(packed_float4) * 100;
      *(device packed_float4*)(out + 5) = packed_float4(1, 2, 3, 4);
    }
    """
    item = struct.pack("<4f2e", 1, 2, 3, 4, 5, 6)
    memory = np.frombuffer(item * 2, np.uint8).copy()
    check_kernel(source, [321, 4, 6, 1620, UNWRITTEN, 1, 2, 3, 4], memory)


def test_float_functions() -> None:
    one = np.float32(1)
    body = "float both(float x) { float c; float s = sincos(x, c); return s + 10 * c; }"
    check(
        {
            "fma(2.0, 3.0, 4.0)": 10,
            "abs(-2.5)": 2.5,
            "select(1.0, 2.0, true)": 2,
            "dot(float3(1, 2, 3), float3(4, 5, 6))": 32,
            "length(float2(3, 4))": 5,
            "normalize(float2(0, 4)).y": 1,
            "atan2(0.0, 1.0) + both(0.0) + signbit(-1.0)": 11,
            "cross(float3(1, 0, 0), float3(0, 1, 0)).z": 1,
            "exp2(float4(1, 2, 3, 4)).z": 8,
            "max(float2(1, 5), float2(3, 2)).y": 5,
            "clamp(float2(-1, 9), 0.0, 1.0).y": 1,
            "numeric_limits<half>::max()": 65504,
            "FLT_MAX": np.finfo(np.float32).max,
            "1.0 / 3.0 * 3.0 - 1.0": one / np.float32(3) * np.float32(3) - one,
        },
        body=body,
    )


def test_nan_and_infinity_are_ieee() -> None:
    check(
        {
            "NAN == NAN": 0,
            "isnan(NAN * 0.0)": 1,
            "isnan(INFINITY - INFINITY)": 1,
            "isinf(as_type<float>(0x7f800000u))": 1,
            "isfinite(FLT_MAX)": 1,
            "NAN < 1.0 || NAN >= 1.0": 0,
            "isnan(half(NAN))": 1,
            "isinf(half(70000.0))": 1,
            "0.0 * -1.0 == 0.0": 1,
            "numeric_limits<float>::lowest() < -1e38": 1,
        }
    )


MATRIX = """
#include <metal_simdgroup_matrix>
kernel void k(device const float* a, device const half* b, device float* out, device half* half_out) {
  simdgroup_float8x8 left, right_t, product;
  simdgroup_half8x8 right, half_product;
  simdgroup_load(left, a, 16, ulong2(8, 1));        // origin: column 8, row 1
  simdgroup_load(right, b, 8);
  simdgroup_multiply(product, left, right);          // float * half
  simdgroup_store(product, out, 8);
  simdgroup_load(right_t, a, 16, ulong2(0, 0), true);
  simdgroup_store(right_t, out + 64, 8);
  simdgroup_store(left, out + 128, 8, ulong2(0, 0), true);
  simdgroup_multiply_accumulate(half_product, right, right, make_filled_simdgroup_matrix<half, 8, 8>(1.0h));
  simdgroup_store(half_product, half_out);
  simdgroup_float8x8 diagonal(3.0);
  simdgroup_multiply_accumulate(product, diagonal, left, product);
  product.thread_elements()[0] += 1;
  simdgroup_store(product, out + 192, 8);
}
"""


def test_simdgroup_matrix() -> None:
    rng = np.random.default_rng(0)
    a = rng.standard_normal((16, 16)).astype(np.float32)
    b = rng.standard_normal((8, 8)).astype(np.float16)
    out, half_out = np.zeros((4, 8, 8), np.float32), np.zeros((8, 8), np.float16)
    run(MATRIX, a, b, out, half_out, threads=32)
    left, right = a[1:9, 8:16], b.astype(np.float32)
    even = np.tile([1, 0], 4)
    np.testing.assert_allclose(out[0], left @ right, atol=1e-6)
    np.testing.assert_array_equal(out[1], a[:8, :8].T)
    np.testing.assert_array_equal(out[2], left.T)
    np.testing.assert_allclose(out[3], left @ right + 3 * left + even, atol=2e-6)
    np.testing.assert_allclose(half_out, (right @ right + 1).astype(np.float16), atol=4e-3)


ATOMICS = """
kernel void k(device atomic_uint* counter, device atomic_float* sum, device atomic_int* largest,
              device uint* out,
              uint i [[thread_position_in_grid]], uint lane [[thread_index_in_threadgroup]]) {
  threadgroup atomic_int local;
  if (lane == 0) atomic_store_explicit(&local, 0, memory_order_relaxed);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  atomic_fetch_add_explicit(&local, 2, memory_order_relaxed);
  atomic_fetch_add_explicit(counter, 1u, memory_order_relaxed);
  atomic_fetch_add_explicit(sum, 0.5f, memory_order_relaxed);
  atomic_fetch_max_explicit(largest, int(i), memory_order_relaxed);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (lane == 0) out[i / 64] = atomic_load_explicit(&local, memory_order_relaxed);
}
"""


def test_atomics() -> None:
    counter, total, largest = np.zeros(1, np.uint32), np.zeros(1, np.float32), np.full(1, -1, np.int32)
    out = np.zeros(4, np.uint32)
    run(ATOMICS, counter, total, largest, out, grid=4, threads=64)
    assert (counter[0], total[0], largest[0]) == (256, 128.0, 255)
    np.testing.assert_array_equal(out, 128)


def test_constant_tables_and_structs() -> None:
    body = """
    struct Entry { int a; float b; };
    constant float table[4] = {1, 2, 3, 4};
    constant Entry entries[] = {{1, 2.5}, {3, 4.5}};
    constant constexpr int sizes[2][2] = {{1, 2}, {3, 4}};
    template <int n> constant constexpr int square = n * n;
    template <int n> struct Traits { static constant constexpr const int doubled = n * 2; };
    float sum(constant float t[4]) { return t[0] + t[3]; }
    float of(constant Entry& e) { return e.a + e.b; }
    namespace inner { constant float scale = 10; }
    float copied() { Entry e = entries[1], f = entries[0]; const Entry g = e; return e.b + f.a + g.a; }
    """
    check(
        {
            "table[2]": 3,
            "entries[1].b": 4.5,
            "sizes[1][0]": 3,
            "Traits<4>::doubled": 8,
            "square<3>": 9,
            "sum(table)": 5,
            "of(entries[0])": 3.5,
            "inner::scale": 10,
            "copied()": 8.5,
        },
        body=body,
    )
