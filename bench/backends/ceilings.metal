// The ceilings that rates are compared with: 8x8 products whose operands are in registers, and reading
// memory. They are in Metal, as the kernels are.
#include <metal_stdlib>
#include <metal_simdgroup_matrix>
using namespace metal;

constant constexpr int kChains = 8;

// Two sets of accumulators, each the B operand of the other: every B is new, and nothing is loaded.
kernel void products(device float* out [[buffer(0)]], constant uint& rounds [[buffer(1)]],
                     constant float& factor [[buffer(2)]], uint group [[threadgroup_position_in_grid]],
                     uint thread_index [[thread_index_in_threadgroup]],
                     uint threads [[threads_per_threadgroup]]) {
  simdgroup_float8x8 a;
  simdgroup_float8x8 even[kChains];
  simdgroup_float8x8 odd[kChains];
  a.thread_elements()[0] = factor;
  a.thread_elements()[1] = factor * 0.5f;
#pragma clang loop unroll(full)
  for (int i = 0; i < kChains; i++) {
    even[i].thread_elements()[0] = factor * i;
    even[i].thread_elements()[1] = factor;
    odd[i].thread_elements()[0] = factor;
    odd[i].thread_elements()[1] = factor * thread_index;
  }
  for (uint round = 0; round < rounds; round++) {
#pragma clang loop unroll(full)
    for (int i = 0; i < kChains; i++) {
      simdgroup_multiply_accumulate(even[i], a, odd[i], even[i]);
    }
#pragma clang loop unroll(full)
    for (int i = 0; i < kChains; i++) {
      simdgroup_multiply_accumulate(odd[i], a, even[i], odd[i]);
    }
  }
  float sum = 0.0f;
#pragma clang loop unroll(full)
  for (int i = 0; i < kChains; i++) {
    sum += even[i].thread_elements()[0] + even[i].thread_elements()[1] + odd[i].thread_elements()[0] +
           odd[i].thread_elements()[1];
  }
  out[group * threads + thread_index] = sum;
}

// Reads `count` float4 once. The write keeps the compiler from dropping the reads.
kernel void reading(const device float4* in [[buffer(0)]], device float* out [[buffer(1)]],
                    constant ulong& count [[buffer(2)]], uint index [[thread_position_in_grid]],
                    uint threads [[threads_per_grid]]) {
  constexpr int kInFlight = 8;
  float4 sum = float4(0.0f);
  for (ulong first = index; first < count; first += ulong(threads) * kInFlight) {
    float4 loaded[kInFlight];
#pragma clang loop unroll(full)
    for (int i = 0; i < kInFlight; i++) {
      const ulong at = first + ulong(i) * threads;
      loaded[i] = at < count ? in[at] : float4(0.0f);
    }
#pragma clang loop unroll(full)
    for (int i = 0; i < kInFlight; i++) {
      sum += loaded[i];
    }
  }
  const float total = sum.x + sum.y + sum.z + sum.w;
  if (total == 12345.678f) {
    out[index] = total;
  }
}
