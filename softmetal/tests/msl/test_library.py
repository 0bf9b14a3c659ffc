"""The parts of Apple's library that foreign kernels use: matrices, vectors of bool, packing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from elementwise import check, check_kernel, run

from softmetal.simt.harness import KernelError

KINDS: dict[str, Any] = {"half": np.float16, "float": np.float32}


# ---- matrices ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("columns", [2, 3, 4])
def test_matrix_products(kind: str, columns: int) -> None:
    """Compares with numpy for every number of rows, with small integers, whose sums are exact in any
    order."""
    random = np.random.default_rng(columns)
    lines, inputs = "", random.integers(-4, 5, 64).astype(KINDS[kind])
    expected: list[Any] = []
    for rows in (2, 3, 4):
        name, vector, size = f"{kind}{columns}x{rows}", f"{kind}{rows}", columns * rows
        m = inputs[:size].reshape(columns, rows).T.astype(np.float32)  # m[row, column]
        other = inputs[16 : 16 + size].reshape(rows, columns).T.astype(np.float32)
        right, left = inputs[40 : 40 + columns].astype(np.float32), inputs[50 : 50 + rows].astype(np.float32)
        column_list = ", ".join(
            f"{vector}({', '.join(f'in[{c * rows + r}]' for r in range(rows))})" for c in range(columns)
        )
        elements = ", ".join(f"in[{16 + i}]" for i in range(size))
        lines += f"""{{
            {name} m({column_list});
            {kind}{rows}x{columns} n({elements});
            {kind}{columns} right; {vector} left;
            for (int i = 0; i < {columns}; ++i) right[i] = in[40 + i];
            for (int i = 0; i < {rows}; ++i) left[i] = in[50 + i];
            {vector} a = m * right;
            {kind}{columns} b = left * m;
            {kind}{rows}x{rows} c = m * n;
            {kind}{rows}x{columns} t = transpose(m);
            {name} s = m * {kind}(2) + m - {kind}(3) * m;
            for (int i = 0; i < {rows}; ++i) *out++ = a[i];
            for (int i = 0; i < {columns}; ++i) *out++ = b[i];
            for (int i = 0; i < {rows}; ++i) for (int k = 0; k < {rows}; ++k) *out++ = c[i][k];
            for (int i = 0; i < {rows}; ++i) for (int k = 0; k < {columns}; ++k) *out++ = t[i][k];
            for (int i = 0; i < {columns}; ++i) for (int k = 0; k < {rows}; ++k) *out++ = s[i][k];
            *out++ = sizeof({name}) + (m == m) - (m != m);
        }}"""
        padded = 4 if rows == 3 else rows
        size_of = columns * padded * inputs.itemsize
        expected += [m @ right, left @ m, (m @ other).T.ravel(), m.ravel(), np.zeros(size), [size_of + 1]]
    body = f"kernel void k(device const {kind}* in, device float* out) {{ {lines} }}"
    check_kernel(body, np.concatenate([np.ravel(part) for part in expected]), inputs)


def test_matrices_in_memory() -> None:
    """A row of three occupies the space of four; the diagonal constructor; conversion of the element type."""
    body = """
    struct Block { float3x3 m; float4x4 n; };
    constant float2x2 table[2] = {float2x2(1, 2, 3, 4), float2x2(7)};
    kernel void k(device const float* in, device float* out) {
      device const float3x3& m = *(device const float3x3*)in;
      half4x4 shared = half4x4(*(device const float4x4*)(in + 16));
      out[0] = m[1][2];
      out[1] = shared[3].w;
      out[2] = float3x3(5.0f)[2][2] + float3x3(5.0f)[2][1];
      out[3] = table[0][1].x + table[1][1].y * 10;
      out[4] = sizeof(Block);
      thread half4x4 copy = shared;
      copy[0] = half4(1);
      out[5] = copy[0][3] + shared[0][3];
      out[6] = ((half4x4)float4x4(3.0f))[1][1];
    }"""
    check_kernel(body, [6, 31, 5, 73, 112, 20, 3], np.arange(32, dtype=np.float32))


# ---- vectors of bool -----------------------------------------------------------------------------


def test_vectors_of_bool() -> None:
    check(
        {
            "sizeof(bool2)": 2,
            "sizeof(bool3)": 4,
            "sizeof(bool4)": 4,
            "bool4(true, false, true, true).zyx.x": 1,
            "bool2(3, 0).x": 1,
            "vec<bool, 2>(true, false).x": 1,
            "int(bool3(0.25f, 0, 7).x) + 10 * bool3(0.25f, 0, 7).z": 11,
            "all(bool2(true, true)) + 2 * any(bool2(false, false))": 1,
            "swizzled(float4(1, 5, 2, 7), float4(4, 3, 2, 1))": 101,
            "float(!(bool2(true, false)).y)": 1,
            "select(float2(1, 2), float2(3, 4), bool2(true, false)).x": 3,
            "(bool2(true, false) && bool2(1)).x + 2 * (bool2(1, 0) || bool2(0)).y": 1,
            "as_type<uint>(bool4(true, false, true, false))": 0x00010001,
        },
        body="""
        int swizzled(float4 a, float4 b) {
          bool4 m = a > b;
          bool2 n = m.yw;
          m.xy = n;
          return n.x + 2 * m.z + 100 * m.x;
        }""",
    )


def test_vectors_of_bool_in_memory() -> None:
    values = np.array([0, 1, 1, 0, 1, 1, 0, 1], np.uint8)
    body = """kernel void k(device const vec<bool, 4>* in, device bool4* out) {
      out[0] = !in[0];
      out[1] = in[1] && in[0].wzyx;
    }"""
    check_kernel(body, [1, 0, 0, 1, 0, 1, 0, 0], values, kind=np.uint8)


# ---- packing -------------------------------------------------------------------------------------

WORDS = np.random.default_rng(3).integers(0, 2**32, 64, dtype=np.uint32)
WORDS[:2] = 0x80808080, 0x80008000  # the lowest signed fields


def fields(words: np.ndarray, bits: list[int], signed: bool) -> np.ndarray:
    """The fields of each word, lowest first, as fractions."""
    found, shift = [], 0
    for width in bits:
        field, largest = words.astype(np.int64) >> shift & ((1 << width) - 1), (1 << (width - signed)) - 1
        found.append(np.where(field > largest, field - (1 << width), field) / largest)
        shift += width
    return np.maximum(np.stack(found, -1), -1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("format", "bits"),
    [
        *(("unorm4x8", [8] * 4), ("unorm2x16", [16] * 2), ("unorm10a2", [10, 10, 10, 2])),
        *(("snorm4x8", [8] * 4), ("snorm2x16", [16] * 2)),
    ],
)
def test_unpack_and_pack(format: str, bits: list[int], kind: str) -> None:
    count, signed = len(bits), format.startswith("s")
    unpacked, packed = np.zeros((64, count), np.float32), np.zeros(64, np.uint32)
    body = f"""kernel void k(device const uint* in, device float* out, device uint* back) {{
      for (int i = 0; i < 64; ++i) {{
        {kind}{count} v = unpack_{format}_to_{kind}(in[i]);
        for (int n = 0; n < {count}; ++n) out[{count} * i + n] = v[n];
        back[i] = pack_{kind}_to_{format}(v);
      }}
    }}"""
    run(body, WORDS, unpacked, packed)
    exact = fields(WORDS, bits, signed)
    np.testing.assert_allclose(unpacked, exact, atol=1e-3 if kind == "half" else 1e-7)
    if kind == "float":
        numbers: Any = WORDS.view(f"i{bits[0] // 8}") if signed else WORDS
        least = -np.iinfo(numbers.dtype).max if signed else 0  # two numbers are -1
        np.testing.assert_array_equal(packed, np.maximum(numbers, least).view(np.uint32))


def test_packing_clamps_and_rounds() -> None:
    check(
        {
            "pack_float_to_unorm4x8(float4(-1, 2, 0.5f, 1))": float(np.float32(0xFF80FF00)),
            "pack_float_to_snorm2x16(float2(-2, 0.25f))": float(np.float32(0x20008001)),
            "unpack_unorm4x8_srgb_to_float(0x80ff00bcu).y": 0,
            "unpack_unorm4x8_srgb_to_float(0x80ff00bcu).z": 1,
            "pack_float_to_srgb_unorm4x8(unpack_unorm4x8_srgb_to_float(0x40bc8007u)) == 0x40bc8007u": 1,
            "pack_float_to_unorm565(unpack_unorm565_to_float(ushort(0x1234)))": 0x1234,
        }
    )


# ---- the language --------------------------------------------------------------------------------


def test_braced_arguments() -> None:
    check(
        {
            "sum({1, 2, 3})": 6,
            "scaled({4, 5}, {2})": 18,
            "of_pair({7, 0.5f})": 7.5,
            "sum({uint(offset) * 2, 1, 1})": 8,
            "either({1, 2}, 3)": 6,
            "either(2, 3)": 5,
            "make(3).y": 4,
        },
        body="""
        constant int offset = 3;
        struct Pair { int a; float b; };
        float sum(uint3 v) { return v.x + v.y + v.z; }
        float scaled(float2 v, float s) { return (v.x + v.y) * s; }
        float of_pair(Pair p) { return p.a + p.b; }
        template <typename T> T either(T a, T b) { return a + b; }
        int either(int2 a, int b) { return a.x + a.y + b; }
        uint2 make(uint a) { return {a, a + 1}; }
        """,
    )


def test_member_functions_by_address_space() -> None:
    values = np.array([5, 7], np.int32)
    body = """
    struct S {
      int a;
      int get() const device { return a; }
      int get() const constant { return a + 100; }
      int get() const thread { return a + 200; }
      int same() const device { return a; }
      int same() const thread { return a; }
      void set(int v) thread { a = v; }
    };
    kernel void k(device const S* s, constant S& c, device int* out) {
      S t = s[1];
      out[0] = s->get();
      out[1] = c.get();
      out[2] = (&t)->get() + s[1].get();
      t.set(9);
      out[3] = t.same() + s[0].same();
    }"""
    check_kernel(body, [5, 105, 214, 14], values, values, kind=np.int32)


def test_whole_structs_between_address_spaces() -> None:
    values = np.arange(32, dtype=np.int32)
    body = """
    struct Inner { int a; int b[3]; };
    struct S { Inner first, second; };
    constant Inner table[2] = {{100, {1, 2, 3}}, {200, {4, 5, 6}}};
    Inner swapped(Inner x) { Inner r = {x.b[0], {x.a, x.b[2], x.b[1]}}; return r; }
    kernel void k(device const S* in, constant S& c, device S* out) {
      threadgroup S shared[2];
      shared[0] = in[1];
      shared[1] = c;
      out[0] = shared[0];
      out[1] = {swapped(shared[1].second), table[1]};
      S local = *in;
      local.first = table[0];
      out[2] = local;
    }"""
    expected = [*range(8, 16), 5, 4, 7, 6, 200, 4, 5, 6, 100, 1, 2, 3, 4, 5, 6, 7]
    check_kernel(body, expected, values, values, kind=np.int32)


def test_casts_between_half_and_bfloat() -> None:
    check(
        {
            "(half)(bfloat)1.5f": 1.5,
            "(bfloat)(half)3.140625h": 3.140625,
            "static_cast<bfloat>(half(257))": 256,
            "half4(bfloat4(1, 2, 3, 4)).z": 3,
            "bfloat2(half2(257, 2)).x": 256,
            "summed(3.5)": 8,
        },
        body="float summed(float x) { bfloat b = bfloat(x); b += bfloat(x); return b * 1.0bf + 1.0f; }",
    )


def test_names_and_numbers_first() -> None:
    """Programs define names that are in C++'s library but not in Metal's; a number converts to a vector."""
    check(
        {
            "forward ? 1 : 0": 1,
            "dot(float2(1, 2), float2(3, 4))": 11,
            "dot(half3(1), half3(2))": 6,
            "fmax(0, float2(-1, 2)).x": 0,
            "min(1, int2(0, 2)).y": 1,
            "make_uniform(3) * make_uniform(2)": 6,
        },
        body="""
        constant bool forward = true;
        template <typename T> float dot(T a, T b) { return -1; }
        """,
    )


def test_initialised_threadgroup_arrays() -> None:
    check_kernel(
        """kernel void k(device float* out) {
          threadgroup float a[4] = {0};
          threadgroup float4 b[2] = {};
          for (int i = 0; i < 4; ++i) a[i] = i;
          b[1] = float4(5);
          out[0] = a[3];
          out[1] = b[1].w;
        }""",
        [3, 5],
    )
    with pytest.raises(KernelError, match="cannot have an initialiser"):
        check_kernel("kernel void k(device float* o) { threadgroup float a[2] = {1, 2}; o[0] = a[1]; }", [2])


def test_a_texture_refuses_its_kernel_only() -> None:
    body = """
    kernel void blurs(texture2d<float> image [[texture(0)]], sampler s [[sampler(0)]], device float4* out) {
      out[0] = image.sample(s, float2(0.5f)) + image.read(uint2(0)) * image.get_width();
    }
    kernel void k(device float* out) { out[0] = 4; }
    """
    out = np.zeros(1, np.float32)
    run(body, out)
    assert out[0] == 4
    with pytest.raises(KernelError, match="'blurs' takes 'image', a texture"):
        run(body, out, kernel="blurs")
