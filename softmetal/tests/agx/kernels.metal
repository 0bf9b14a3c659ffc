// Kernels whose cost on M1 and M2 can be told by hand.
#include <metal_stdlib>
using namespace metal;

#ifndef LIVE
#define LIVE 8
#endif
// Keeps LIVE floats in registers across a barrier.
kernel void keep(device float* y, const device float* x, uint i [[thread_position_in_grid]]) {
  float values[LIVE];
#pragma clang loop unroll(full)
  for (int k = 0; k < LIVE; k++) values[k] = x[i * LIVE + k];
  threadgroup_barrier(mem_flags::mem_device);
  float sum = 0.0f;
#pragma clang loop unroll(full)
  for (int k = LIVE - 1; k >= 0; k--) sum = sum * values[k] + values[LIVE - 1 - k];
  y[i] = sum;
}

// x is infinite or NaN: y becomes NaN.
kernel void add_zero(device float* y, const device float* x, uint i [[thread_position_in_grid]]) {
  y[i] = fma(x[i], 0.0f, y[i]);
}

constant bool wide [[function_constant(0)]];

// A step of the inner loop is two by four products of half.
kernel void multiply(device float* c [[buffer(0)]], const device half* a [[buffer(1)]],
                     const device half* b [[buffer(2)]], constant uint2& size [[buffer(3)]],
                     uint group [[threadgroup_position_in_grid]],
                     ushort simdgroup [[simdgroup_index_in_threadgroup]]) {
  for (uint column = 0; column < size.y; column += 32) {
    const device half* rows = a + (group * 4 + simdgroup) * 16 * size.x;
    simdgroup_float8x8 sums[2][4];
    for (int i = 0; i < 2; i++)
      for (int j = 0; j < 4; j++) sums[i][j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    for (uint k = 0; k < size.x; k += 8) {
      simdgroup_half8x8 left[2], right[4];
      for (int i = 0; i < (wide ? 2 : 1); i++) simdgroup_load(left[i], rows + i * 8 * size.x + k, size.x);
      for (int j = 0; j < 4; j++) simdgroup_load(right[j], b + k * size.y + column + j * 8, size.y);
      for (int i = 0; i < (wide ? 2 : 1); i++)
        for (int j = 0; j < 4; j++) simdgroup_multiply_accumulate(sums[i][j], left[i], right[j], sums[i][j]);
    }
    for (int i = 0; i < 2; i++)
      for (int j = 0; j < 4; j++)
        simdgroup_store(sums[i][j], c + (group * 64 + simdgroup * 16 + i * 8) * size.y + column + j * 8,
                        size.y);
  }
}

kernel void row_sums(const device float* x [[buffer(0)]], device float* sums [[buffer(1)]],
                     constant uint& n [[buffer(2)]], uint row [[threadgroup_position_in_grid]],
                     ushort i [[thread_index_in_threadgroup]], ushort lane [[thread_index_in_simdgroup]],
                     ushort simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup float partial[8];
  float sum = 0.0f;
  for (uint k = i; k < n; k += 256) sum += x[row * n + k];
  for (ushort step = 1; step < 32; step *= 2) sum += simd_shuffle_xor(sum, step);
  if (lane == 0) partial[simdgroup] = sum;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (i == 0) {
    float total = 0.0f;
    for (int s = 0; s < 8; s++) total += partial[s];
    sums[row] = total;
  }
}

kernel void scratch(device bfloat* y, const device bfloat* x, threadgroup bfloat* shared [[threadgroup(1)]],
                    uint i [[thread_position_in_grid]], ushort t [[thread_index_in_threadgroup]]) {
  shared[t] = x[i] * 2.0bf;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  y[i] = -shared[t ^ 1];
}
