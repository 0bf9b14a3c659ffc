// Rows of a tensor of any shape, each shared by the threads of one simdgroup or of all simdgroups of a
// threadgroup.
#pragma once

#include <metal_stdlib>

#include "../common/params.h"

using namespace metal;

namespace fattn {

FATTN_CONSTEXPR int kSimdgroups = FATTN_SIMDGROUPS;
FATTN_CONSTEXPR int kRowSimdgroups = FATTN_ROW_SIMDGROUPS;  // per row, 1 or all of the threadgroup
FATTN_CONSTEXPR int kVectors = FATTN_VECTORS;               // per thread
FATTN_CONSTEXPR int kThreads = kSimdgroups * kSimdWidth;
FATTN_CONSTEXPR int kRowThreads = kRowSimdgroups * kSimdWidth;
FATTN_CONSTEXPR int kGroupRows = kSimdgroups / kRowSimdgroups;
FATTN_CONSTEXPR int kBlockColumns = kRowThreads * kVectors * kLogitsVector;

// The sum over all threads that share the row. `shared` has one element for each of their simdgroups.
inline float row_sum(float x, threadgroup float* shared, ushort simdgroup_index, ushort lane) {
  const float total = simd_sum(x);
  if (kRowSimdgroups == 1) {
    return total;
  }
  if (lane == 0) {
    shared[simdgroup_index] = total;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return simd_sum(lane < kRowSimdgroups ? shared[lane] : 0.0f);
}

}  // namespace fattn
