// Merge: partial results over disjoint keys -> the result over all of them, by log-sum-exp. One simdgroup per
// row.
//
// Serves the second pass of decode (float32 partials) and fattn::merge.
#include <metal_stdlib>

#include "params.h"

using namespace metal;

namespace fattn {

typedef FATTN_T Partial;
typedef FATTN_OUT_T Result;

FATTN_CONSTEXPR int kRowsPerThreadgroup = FATTN_SIMDGROUPS;

}  // namespace fattn

using namespace fattn;

kernel void fattn_merge(const device Partial* partial_out [[buffer(fattn::kSlotPartialOut)]],
                        const device float* partial_lse [[buffer(fattn::kSlotPartialLse)]],
                        device Result* out [[buffer(fattn::kSlotOut)]],
                        device float* lse [[buffer(fattn::kSlotLse)]],
                        constant MergeParams& params [[buffer(fattn::kSlotParams)]],
                        uint group [[threadgroup_position_in_grid]],
                        ushort simdgroup_index [[simdgroup_index_in_threadgroup]],
                        ushort lane [[thread_index_in_simdgroup]]) {
  const long row = long(group) * kRowsPerThreadgroup + simdgroup_index;
  if (row >= params.rows) {
    return;
  }
  float largest = -INFINITY;
  for (int part = 0; part < params.parts; part++) {
    largest = fmax(largest, partial_lse[part * params.rows + row]);
  }
  const float origin = largest == -INFINITY ? 0.0f : largest;
  float total = 0.0f;
  for (int part = 0; part < params.parts; part++) {
    total += fast::exp2((partial_lse[part * params.rows + row] - origin) * M_LOG2E_F);
  }
  const float inverse = total == 0.0f ? 0.0f : 1.0f / total;
  for (int column = lane; column < params.head_dim; column += kSimdWidth) {
    float weighted = 0.0f;
    for (int part = 0; part < params.parts; part++) {
      const float weight = fast::exp2((partial_lse[part * params.rows + row] - origin) * M_LOG2E_F);
      // A part that saw no key has weight 0, and may hold anything.
      if (weight != 0.0f) {
        weighted += weight * float(partial_out[(part * params.rows + row) * params.head_dim + column]);
      }
    }
    out[row * params.head_dim + column] = Result(weighted * inverse);
  }
  if (lane == 0) {
    lse[row] = total == 0.0f ? -INFINITY : largest + log(total);
  }
}
