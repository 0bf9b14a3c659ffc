// RMSNorm over the last dimension, times a weight and an activated gate, either of which may be absent. The
// arithmetic is in float32, the result contiguous.
//
// The threads of a row hold kBlockColumns columns of it in registers. A row up to this length is read once;
// of a longer one, the blocks before the last are read twice.
#include "norm.h"
#include "rows.h"

FATTN_DECLARE_CONSTANT(bool, sliced)
FATTN_DECLARE_CONSTANT(bool, weighted)
FATTN_DECLARE_CONSTANT(uint, gate)
constant bool fc_gated = fc_gate != fattn::kGateNone;

#include "../common/grid.h"

namespace fattn {

typedef FATTN_OUT_T Out;  // Element or float

inline long row_offset(uint row, constant Strides3& strides, constant RmsNormParams& params) {
  if (params.length == params.rows) {
    return row * strides.row;
  }
  const uint rest = row / uint(params.length);
  const uint batch = rest / uint(params.heads);
  return batch * strides.batch + (rest - batch * params.heads) * strides.head +
         (row - rest * params.length) * strides.row;
}

// Four columns of a row; 0 beyond its end.
template <typename T>
inline void load_within(const device T* row, uint column, uint columns,
                        thread float (&numbers)[kLaneColumns]) {
  FATTN_UNROLL
  for (int e = 0; e < kLaneColumns; e++) {
    numbers[e] = !fc_vector_loads && column + e < columns ? float(row[column + e]) : 0.0f;
  }
  if (fc_vector_loads && column < columns) {
    load_columns(row, column, true, numbers);
  }
}

// A rounded x and a weight of its dtype have a rounded product, as in torch.
inline float gated(float product, float gate) {
  const bool rounds = kNorm == kNormRounded && is_same_v<Weight, Element>;
  const float activated = fc_gate == kGateSilu ? silu(gate) : sigmoid(gate);
  return (rounds ? rounded(product) : product) * activated;
}

}  // namespace fattn

using namespace fattn;

[[kernel, max_total_threads_per_threadgroup(fattn::kThreads)]] void fattn_rms_norm(
    const device Element* x [[buffer(fattn::kBufferRows)]],
    const device Weight* weight [[buffer(fattn::kBufferWeight), function_constant(fc_weighted)]],
    const device Element* gate [[buffer(fattn::kBufferGate), function_constant(fc_gated)]],
    device Out* out [[buffer(fattn::kSlotOut)]],
    constant RmsNormParams& params [[buffer(fattn::kSlotParams)]],
    constant GridSlice& slice [[buffer(fattn::kSlotSlice), function_constant(fc_sliced)]],
    uint group [[threadgroup_position_in_grid]], ushort simdgroup_index [[simdgroup_index_in_threadgroup]],
    ushort lane [[thread_index_in_simdgroup]]) {
  threadgroup float shared_squares[kRowSimdgroups];

  const uint row = uint(group_in_grid(group, slice)) * kGroupRows + simdgroup_index / kRowSimdgroups;
  if (row >= uint(params.rows)) {
    return;
  }
  const uint columns = params.columns;
  const uint first = (simdgroup_index % kRowSimdgroups * kSimdWidth + lane) * kLaneColumns;
  const uint step = kRowThreads * kLaneColumns;
  const device Element* source = x + row_offset(row, params.x, params);

  float block[kVectors][kLaneColumns];
  float squares = 0.0f;
  const int last = (columns - 1) / kBlockColumns * kBlockColumns;
  for (int begin = 0; begin <= last; begin += kBlockColumns) {
    FATTN_UNROLL
    for (int v = 0; v < kVectors; v++) {
      load_within(source, begin + first + v * step, columns, block[v]);
      FATTN_UNROLL
      for (int e = 0; e < kLaneColumns; e++) {
        squares += block[v][e] * block[v][e];
      }
    }
  }
  squares = row_sum(squares, shared_squares, simdgroup_index, lane);
  const float scale = inverse_rms(squares, columns, params.eps);

  const device Element* gates = nullptr;
  if (fc_gated) {
    gates = gate + row_offset(row, params.gate, params);
  }
  device Out* target = out + long(row) * columns;
  for (int begin = last; begin >= 0; begin -= kBlockColumns) {
    FATTN_UNROLL
    for (int v = 0; v < kVectors; v++) {
      const uint column = begin + first + v * step;
      float factors[kLaneColumns] = {1.0f, 1.0f, 1.0f, 1.0f};
      float of_gate[kLaneColumns];
      if (begin != last) {
        load_within(source, column, columns, block[v]);
      }
      if (fc_weighted) {
        load_within(weight, column, columns, factors);
      }
      if (fc_gated) {
        load_within(gates, column, columns, of_gate);
      }
      FATTN_UNROLL
      for (int e = 0; e < kLaneColumns; e++) {
        const float product = normed(block[v][e], scale, factors[e]);
        block[v][e] = fc_gated ? gated(product, of_gate[e]) : product;
        if (!fc_vector_loads && column + e < columns) {
          target[column + e] = Out(block[v][e]);
        }
      }
      if (fc_vector_loads && column < columns) {
        store_columns(target, column, block[v]);
      }
    }
  }
}
