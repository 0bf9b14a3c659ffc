// RMSNorm over the last dimension of a tensor of any shape, times a weight and an activated gate, either of
// which may be absent. The arithmetic is in float32, the result contiguous.
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

// A thread's columns of a vector; 0 beyond the end of the row.
template <typename T>
inline void load_within(const device T* row, uint column, uint columns,
                        thread float (&numbers)[kLaneColumns]) {
  FATTN_UNROLL
  for (int e = 0; e < kLaneColumns; e++) {
    numbers[e] = !fc_vector_loads && column + e < columns ? float(row[column + e]) : 0.0f;
  }
  if (fc_vector_loads && column < columns) {
    load_columns(row, column, numbers);
  }
}

inline uint column_of(uint first, int vector, uint thread_in_row) {
  return first + (vector * kRowThreads + thread_in_row) * kLaneColumns;
}

struct NormBlock {
  float x[kVectors][kLaneColumns];

  void load(const device Element* row, uint first, uint columns, uint thread_in_row) thread {
    FATTN_UNROLL
    for (int v = 0; v < kVectors; v++) {
      load_within(row, column_of(first, v, thread_in_row), columns, x[v]);
    }
  }

  float squares() const thread {
    float sum = 0.0f;
    FATTN_UNROLL
    for (int v = 0; v < kVectors; v++) {
      FATTN_UNROLL
      for (int e = 0; e < kLaneColumns; e++) {
        sum += x[v][e] * x[v][e];
      }
    }
    return sum;
  }
};

// A rounded x and a weight of its dtype have a rounded product, as in torch.
inline float gated(float product, float gate) {
  const bool rounds = kNorm == kNormRounded && is_same_v<Weight, Element>;
  const float activated = (fc_gate == kGateSilu ? gate : 1.0f) / (1.0f + precise::exp(-gate));
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

  const long row = group_in_grid(group, slice) * kGroupRows + simdgroup_index / kRowSimdgroups;
  if (row >= params.rows) {
    return;
  }
  const uint thread_in_row = simdgroup_index % kRowSimdgroups * kSimdWidth + lane;
  const uint columns = params.columns;
  const device Element* source = x + row_offset(uint(row), params.dims, params.sizes, params.strides);
  const device Element* gates = nullptr;
  if (fc_gated) {
    gates = gate + row_offset(uint(row), params.dims, params.sizes, params.gate_strides);
  }
  device Out* target = out + row * columns;

  NormBlock block;
  float squares = 0.0f;
  const int last = (columns - 1) / kBlockColumns * kBlockColumns;
  for (int first = 0; first <= last; first += kBlockColumns) {
    block.load(source, first, columns, thread_in_row);
    squares += block.squares();
  }
  squares = row_sum(squares, shared_squares, simdgroup_index, lane);
  const float scale = inverse_rms(squares, columns, params.eps);

  for (int first = last; first >= 0; first -= kBlockColumns) {
    if (first != last) {
      block.load(source, first, columns, thread_in_row);
    }
    FATTN_UNROLL
    for (int v = 0; v < kVectors; v++) {
      const uint column = column_of(first, v, thread_in_row);
      float factors[kLaneColumns] = {1.0f, 1.0f, 1.0f, 1.0f};
      float of_gate[kLaneColumns];
      if (fc_weighted) {
        load_within(weight, column, columns, factors);
      }
      if (fc_gated) {
        load_within(gates, column, columns, of_gate);
      }
      FATTN_UNROLL
      for (int e = 0; e < kLaneColumns; e++) {
        const float product = normed(block.x[v][e], scale, factors[e]);
        block.x[v][e] = fc_gated ? gated(product, of_gate[e]) : product;
      }
      if (fc_vector_loads && column < columns) {
        store_columns(target, column, block.x[v]);
      }
      FATTN_UNROLL
      for (int e = 0; e < kLaneColumns; e++) {
        if (!fc_vector_loads && column + e < columns) {
          target[column + e] = Out(block.x[v][e]);
        }
      }
    }
  }
}
