// RMS norm of query and key heads, rotary embedding, and the write of keys and values into a cache, with the
// roundings of transformers. A simdgroup takes one row: the query, key or value of one token and head.
#include "lane_row.h"
#include "norm.h"

FATTN_DECLARE_CONSTANT(bool, query_norm)
FATTN_DECLARE_CONSTANT(bool, key_norm)
FATTN_DECLARE_CONSTANT(bool, slots)
FATTN_DECLARE_CONSTANT(bool, starts)
FATTN_DECLARE_CONSTANT(bool, values)
FATTN_DECLARE_CONSTANT(bool, vector_tables)

namespace fattn {

typedef FATTN_TABLE_T Table;  // Element or float

FATTN_CONSTEXPR int kRotaryDim = FATTN_ROTARY_DIM;
FATTN_CONSTEXPR int kOffset = FATTN_ROTARY_OFFSET;  // the first rotated column
FATTN_CONSTEXPR int kPairs = kRotaryDim / 2;
FATTN_CONSTEXPR int kStyle = FATTN_ROTARY_STYLE;
// Whether the pairs of a lane's four columns are neighbours, and aligned.
FATTN_CONSTEXPR bool kPairsAligned = kOffset % kLaneColumns == 0 && kPairs % kLaneColumns == 0;

// A product that is rounded before it is added: a compiler may contract x * y + z, but not this.
inline float rounded_product(float x, float y) {
  const float product = x * y;
  return is_same_v<Table, Element> && !is_same_v<Element, float> ? rounded(product)
                                                                 : fma(x, y, copysign(0.0f, product));
}

inline bool is_rotated(int column) { return column >= kOffset && column < kOffset + kRotaryDim; }

// The pair of a rotated column of the result, and whether the column is the second of its pair.
inline int pair_of(int column) {
  return kStyle == kStylePairs ? (column - kOffset) / 2 : (column - kOffset) % kPairs;
}
inline bool is_second(int column) {
  return kStyle == kStylePairs ? (column - kOffset) % 2 == 1 : column - kOffset >= kPairs;
}

// The column of the source with the first or the second number of a pair.
inline int source_of(int pair, bool second) {
  return kOffset + (kStyle == kStyleHalves ? pair + (second ? kPairs : 0) : 2 * pair + (second ? 1 : 0));
}

// Loads the numbers for four neighbouring columns of the result: those at the same place in their pairs, and
// the other ones of these pairs.
template <typename T>
inline void load_pairs(const device T* source, int column, thread float (&own)[kLaneColumns],
                       thread float (&other)[kLaneColumns]) {
  const bool together = fc_vector_loads && kPairsAligned && kStyle != kStylePairsToHalves;
  if (together) {
    const bool is_apart = kStyle == kStyleHalves && is_rotated(column);
    load_columns(source, column, true, own);
    load_columns(source, is_apart ? source_of(pair_of(column), !is_second(column)) : column, true, other);
  }
  FATTN_UNROLL
  for (int e = 0; e < kLaneColumns; e++) {
    const int c = column + e;
    if (!together) {
      own[e] = float(source[is_rotated(c) ? source_of(pair_of(c), is_second(c)) : c]);
      other[e] = float(source[is_rotated(c) ? source_of(pair_of(c), !is_second(c)) : c]);
    } else if (kStyle == kStylePairs) {
      other[e] = own[e ^ 1];
    }
  }
}

// The factors of four neighbouring columns of the result, in a position's row of a table.
inline void load_factors(const device Table* table, constant TableStrides& strides, int column,
                         thread float (&factors)[kLaneColumns]) {
  if (fc_vector_tables && kPairsAligned && kStyle != kStylePairs) {
    const int place = pair_of(column) + (is_second(column) ? strides.second : 0);
    load_columns(table, is_rotated(column) ? place : 0, true, factors);
    return;
  }
  FATTN_UNROLL
  for (int e = 0; e < kLaneColumns; e++) {
    const int c = column + e;
    const int place = pair_of(c) * strides.column + (is_second(c) ? strides.second : 0);
    factors[e] = is_rotated(c) ? float(table[place]) : 0.0f;
  }
}

// 1 / the root mean square of a row.
inline float norm_scale(const device Element* source, float eps, ushort lane) {
  float sum = 0.0f;
  FATTN_UNROLL
  for (int pass = 0; pass * kPassColumns < kHeadDim; pass++) {
    const int column = pass * kPassColumns + lane * kLaneColumns;
    float x[kLaneColumns] = {0.0f};
    if (column < kHeadDim) {
      load_columns(source, column, fc_vector_loads, x);
    }
    FATTN_UNROLL
    for (int e = 0; e < kLaneColumns; e++) {
      sum += x[e] * x[e];
    }
  }
  return inverse_rms(simd_sum(sum), kHeadDim, eps);
}

// Loads, normalises and rotates a row of queries or keys. The norm reads it twice: with all columns in
// registers, wide rows would not fit.
inline void make_row(thread LaneRow<kHeadDim>& row, const device Element* source, const device Weight* weight,
                     bool has_norm, const device Table* cosines, const device Table* sines,
                     constant RotaryParams& params, ushort lane) {
  const float scale = has_norm ? norm_scale(source, params.eps, lane) : 1.0f;
  FATTN_UNROLL
  for (int pass = 0; pass * kPassColumns < kHeadDim; pass++) {
    const int column = pass * kPassColumns + lane * kLaneColumns;
    float own[kLaneColumns] = {0.0f}, other[kLaneColumns] = {0.0f};
    if (column < kHeadDim) {
      load_pairs(source, column, own, other);
      if (has_norm) {
        float own_weight[kLaneColumns], other_weight[kLaneColumns];
        load_pairs(weight, column, own_weight, other_weight);
        FATTN_UNROLL
        for (int e = 0; e < kLaneColumns; e++) {
          own[e] = rounded(normed(own[e], scale, own_weight[e]));
          other[e] = rounded(normed(other[e], scale, other_weight[e]));
        }
      }
      float cosine[kLaneColumns], sine[kLaneColumns];
      load_factors(cosines, params.cos, column, cosine);
      load_factors(sines, params.sin, column, sine);
      FATTN_UNROLL
      for (int e = 0; e < kLaneColumns; e++) {
        const float y = is_second(column + e) ? other[e] : -other[e];
        const float turned = rounded(rounded_product(own[e], cosine[e]) + rounded_product(y, sine[e]));
        own[e] = is_rotated(column + e) ? turned : own[e];
      }
    }
    FATTN_UNROLL
    for (int e = 0; e < kLaneColumns; e++) {
      row.x[pass][e] = own[e];
    }
  }
}

// Stores a row as it is.
template <typename T>
inline void store_row(thread LaneRow<kHeadDim>& row, device T* target, ushort lane) {
  FATTN_UNROLL
  for (int pass = 0; pass * kPassColumns < kHeadDim; pass++) {
    const int column = pass * kPassColumns + lane * kLaneColumns;
    if (column < kHeadDim) {
      store_columns(target, column, row.x[pass]);
    }
  }
}

}  // namespace fattn

using namespace fattn;

[[kernel, max_total_threads_per_threadgroup(fattn::kThreads)]] void fattn_rotary(
    const device Element* query [[buffer(fattn::kSlotQuery)]],
    const device Element* key [[buffer(fattn::kSlotKey)]],
    const device Element* value [[buffer(fattn::kSlotValue), function_constant(fc_values)]],
    const device Table* cosines [[buffer(fattn::kBufferCos)]],
    const device Table* sines [[buffer(fattn::kBufferSin)]], device Element* out [[buffer(fattn::kSlotOut)]],
    device Stored* key_cache [[buffer(fattn::kSlotKeyCache)]],
    device Stored* value_cache [[buffer(fattn::kSlotValueCache), function_constant(fc_values)]],
    const device SlotNumber* slot_mapping [[buffer(fattn::kSlotSlotMapping), function_constant(fc_slots)]],
    const device SlotNumber* starts [[buffer(fattn::kBufferStarts), function_constant(fc_starts)]],
    const device Weight* query_norm [[buffer(fattn::kBufferQueryNorm), function_constant(fc_query_norm)]],
    const device Weight* key_norm [[buffer(fattn::kBufferKeyNorm), function_constant(fc_key_norm)]],
    device Scale* key_scales [[buffer(fattn::kSlotKeyScales), function_constant(fc_scales)]],
    device Scale* value_scales [[buffer(fattn::kSlotValueScales), function_constant(fc_scales)]],
    constant RotaryParams& params [[buffer(fattn::kSlotParams)]],
    uint3 group [[threadgroup_position_in_grid]], ushort simdgroup_index [[simdgroup_index_in_threadgroup]],
    ushort lane [[thread_index_in_simdgroup]]) {
  const int batch = int(group.z), position = int(group.x);
  int head = int(group.y) * kSimdgroups + simdgroup_index;
  if (head >= params.q_heads + params.kv_heads * (fc_values ? 2 : 1)) {
    return;
  }
  const SlotPlace token = {batch, position};
  SlotPlace place = {batch, params.start + position};
  const bool is_query = head < params.q_heads;
  if (!is_query) {
    head -= params.q_heads;
    if (fc_slots) {
      const long slot = slot_mapping[batch * params.slot_batch + position * params.slot_row];
      if (slot < 0 || slot >= params.slots) {
        return;
      }
      place = place_of(slot, params.block_size);
    }
    if (fc_starts) {
      const long start = starts[batch * params.slot_batch];
      if (start < 0 || start >= params.block_size - place.slot) {
        return;
      }
      place.slot += start;
    }
  }
  device Scale* scales = nullptr;
  if (fc_values && !is_query && head >= params.kv_heads) {
    head -= params.kv_heads;
    if (fc_scales) {
      scales = value_scales + offset_of(place, head, params.value_scales);
    }
    write_row<kValueDim>(value + offset_of(token, head, params.value),
                         value_cache + offset_of(place, head, params.value_cache), scales, lane);
    return;
  }

  const device Element* source =
      is_query ? query + offset_of(token, head, params.query) : key + offset_of(token, head, params.key);
  const bool has_norm = is_query ? fc_query_norm : fc_key_norm;
  const device Weight* weight = nullptr;
  if (fc_query_norm && is_query) {
    weight = query_norm;
  }
  if (fc_key_norm && !is_query) {
    weight = key_norm;
  }
  LaneRow<kHeadDim> row;
  make_row(row, source, weight, has_norm, cosines + batch * params.cos.batch + position * params.cos.row,
           sines + batch * params.sin.batch + position * params.sin.row, params, lane);
  if (is_query) {
    store_row(row, out + offset_of(token, head, params.out), lane);
    return;
  }
  device Stored* target = key_cache + offset_of(place, head, params.key_cache);
  if (kFormat == kKvFloat) {
    store_row(row, target, lane);
    return;
  }
  if (fc_scales) {
    scales = key_scales + offset_of(place, head, params.key_scales);
  }
  write_quantised_row<kHeadDim>(row, target, scales, lane);
}
