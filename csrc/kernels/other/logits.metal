// softmax over the last dimension, and softcap, for logits of any shape and strides. The arithmetic is in
// float32, the result contiguous.
//
// One simdgroup, or all simdgroups of a threadgroup, take a row of softmax and hold kBlockColumns columns of
// it in registers. Up to this length a row is read once and written once; in a longer row the blocks after
// the first are read twice, for the sum and for the result.
#include "../common/params.h"
#include "../common/softcap.h"

using namespace metal;

// The only function constants of these kernels, declared without constants.h.
FATTN_DECLARE_CONSTANT(bool, vector_loads)
FATTN_DECLARE_CONSTANT(bool, softcap)
FATTN_DECLARE_CONSTANT(bool, sliced)

#include "../common/grid.h"
#include "rows.h"

namespace fattn {

typedef FATTN_T Element;  // float, half or bfloat

typedef vec<Element, kLogitsVector> ElementVector;

// Row indices have 32 bits, because 64-bit division is slow on GPUs.
inline long row_offset(uint row, constant LogitsParams& params) {
  long offset = 0;
  for (int dim = 0; dim + 1 < params.dims; dim++) {
    const uint size = uint(params.sizes[dim]);
    const uint rest = row / size;
    offset += (row - rest * size) * params.strides[dim];
    row = rest;
  }
  return offset + row * params.strides[params.dims - 1];
}

// A tensor of more than 2^32 elements has one row.
inline long element_offset(long element, constant LogitsParams& params) {
  const uint row = params.rows == 1 ? 0 : uint(element) / uint(params.columns);
  return row_offset(row, params) + (element - row * params.columns) * params.column_stride;
}

// The logit of an element for softmax: capped, except that -inf stays -inf and hides its column.
inline float softmax_logit(Element x, float cap) {
  const float logit = float(x);
  return fc_softcap && logit != -INFINITY ? softcapped(logit / cap, cap) : logit;
}

// A thread's part of a block of a row. Columns that do not exist count as hidden.
struct RowBlock {
  float x[kVectors][kLogitsVector];

  void load(const device Element* row, int first, int thread_in_row, constant LogitsParams& params) thread {
    FATTN_UNROLL
    for (int v = 0; v < kVectors; v++) {
      const int column = first + (v * kRowThreads + thread_in_row) * kLogitsVector;
      if (fc_vector_loads && column < params.columns) {
        const ElementVector columns = *(const device ElementVector*)(row + column);
        FATTN_UNROLL
        for (int e = 0; e < kLogitsVector; e++) {
          x[v][e] = softmax_logit(columns[e], params.cap);
        }
        continue;
      }
      FATTN_UNROLL
      for (int e = 0; e < kLogitsVector; e++) {
        x[v][e] = -INFINITY;
        if (column + e < params.columns) {
          x[v][e] = softmax_logit(row[(column + e) * params.column_stride], params.cap);
        }
      }
    }
  }

  float largest() const thread {
    float result = -INFINITY;
    FATTN_UNROLL
    for (int v = 0; v < kVectors; v++) {
      FATTN_UNROLL
      for (int e = 0; e < kLogitsVector; e++) {
        result = fmax(result, x[v][e]);
      }
    }
    return result;
  }

  // Turns the logits into weights and returns their sum.
  float to_weights(float origin) thread {
    float total = 0.0f;
    FATTN_UNROLL
    for (int v = 0; v < kVectors; v++) {
      FATTN_UNROLL
      for (int e = 0; e < kLogitsVector; e++) {
        x[v][e] = precise::exp(x[v][e] - origin);
        total += x[v][e];
      }
    }
    return total;
  }

  void store(device Element* row, int first, int thread_in_row, float factor,
             constant LogitsParams& params) const thread {
    FATTN_UNROLL
    for (int v = 0; v < kVectors; v++) {
      const int column = first + (v * kRowThreads + thread_in_row) * kLogitsVector;
      if (fc_vector_loads && column < params.columns) {
        ElementVector columns;
        FATTN_UNROLL
        for (int e = 0; e < kLogitsVector; e++) {
          columns[e] = Element(x[v][e] * factor);
        }
        *(device ElementVector*)(row + column) = columns;
        continue;
      }
      FATTN_UNROLL
      for (int e = 0; e < kLogitsVector; e++) {
        if (column + e < params.columns) {
          row[column + e] = Element(x[v][e] * factor);
        }
      }
    }
  }
};

// The maximum over all threads that share the row. `shared` has one element for each of their simdgroups.
inline float row_max(float x, threadgroup float* shared, ushort simdgroup_index, ushort lane) {
  const float largest = simd_max(x);
  if (kRowSimdgroups == 1) {
    return largest;
  }
  if (lane == 0) {
    shared[simdgroup_index] = largest;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return simd_max(lane < kRowSimdgroups ? shared[lane] : -INFINITY);
}

// The number to subtract from logits with this maximum: 0 if all are -inf.
inline float origin_of(float largest) { return largest == -INFINITY ? 0.0f : largest; }

}  // namespace fattn

using namespace fattn;

// fmax ignores NaN, but the sum propagates it, and inf - inf: the whole row becomes NaN. The sum of a row
// with only -inf is 0.
[[kernel, max_total_threads_per_threadgroup(fattn::kThreads)]] void fattn_softmax(
    const device Element* scores [[buffer(fattn::kSlotLogits)]],
    device Element* out [[buffer(fattn::kSlotOut)]],
    constant LogitsParams& params [[buffer(fattn::kSlotParams)]],
    constant GridSlice& slice [[buffer(fattn::kSlotSlice), function_constant(fc_sliced)]],
    uint group [[threadgroup_position_in_grid]], ushort simdgroup_index [[simdgroup_index_in_threadgroup]],
    ushort lane [[thread_index_in_simdgroup]]) {
  threadgroup float shared_largest[kRowSimdgroups];
  threadgroup float shared_total[kRowSimdgroups];

  const long row = group_in_grid(group, slice) * kGroupRows + simdgroup_index / kRowSimdgroups;
  if (row >= params.rows) {
    return;
  }
  const int thread_in_row = simdgroup_index % kRowSimdgroups * kSimdWidth + lane;
  const int columns = int(params.columns);
  const device Element* source = scores + row_offset(uint(row), params);
  device Element* target = out + row * columns;

  RowBlock block;
  float largest = -INFINITY;
  float total = 0.0f;
  for (int first = kBlockColumns; first < columns; first += kBlockColumns) {
    block.load(source, first, thread_in_row, params);
    const float before = largest;
    largest = fmax(largest, block.largest());
    total = total * precise::exp(before - origin_of(largest)) + block.to_weights(origin_of(largest));
  }
  block.load(source, 0, thread_in_row, params);
  const float origin =
      origin_of(row_max(fmax(largest, block.largest()), shared_largest, simdgroup_index, lane));
  total = total * precise::exp(largest - origin) + block.to_weights(origin);
  total = row_sum(total, shared_total, simdgroup_index, lane);
  const float factor = total == 0.0f ? 0.0f : 1.0f / total;

  block.store(target, 0, thread_in_row, factor, params);
  for (int first = kBlockColumns; first < columns; first += kBlockColumns) {
    block.load(source, first, thread_in_row, params);
    block.to_weights(origin);
    block.store(target, first, thread_in_row, factor, params);
  }
}

[[kernel, max_total_threads_per_threadgroup(fattn::kThreads)]] void fattn_softcap(
    const device Element* x [[buffer(fattn::kSlotLogits)]], device Element* out [[buffer(fattn::kSlotOut)]],
    constant LogitsParams& params [[buffer(fattn::kSlotParams)]],
    constant GridSlice& slice [[buffer(fattn::kSlotSlice), function_constant(fc_sliced)]],
    uint group [[threadgroup_position_in_grid]], ushort thread_index [[thread_index_in_threadgroup]]) {
  const long count = params.rows * params.columns;
  const long first = (group_in_grid(group, slice) * kThreads + thread_index) * kLogitsVector;
  if (fc_vector_loads && first + kLogitsVector <= count) {
    const device ElementVector* source = (const device ElementVector*)(x + element_offset(first, params));
    ElementVector elements = *source;
    FATTN_UNROLL
    for (int e = 0; e < kLogitsVector; e++) {
      elements[e] = Element(softcapped(float(elements[e]) / params.cap, params.cap));
    }
    *(device ElementVector*)(out + first) = elements;
    return;
  }
  for (long element = first; element < min(first + kLogitsVector, count); element++) {
    const float logit = float(x[element_offset(element, params)]);
    out[element] = Element(softcapped(logit / params.cap, params.cap));
  }
}
