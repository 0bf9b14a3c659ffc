// RMS norm of query and key heads, rotary embedding, and the write of keys and values into a cache, with the
// roundings of transformers. A simdgroup takes one row: the query, key or value of one token and head.
#include "lane_row.h"
#include "norm.h"

FATTN_DECLARE_CONSTANT(bool, query_norm)
FATTN_DECLARE_CONSTANT(bool, key_norm)
FATTN_DECLARE_CONSTANT(bool, slots)
FATTN_DECLARE_CONSTANT(bool, starts)
FATTN_DECLARE_CONSTANT(bool, values)

namespace fattn {

typedef FATTN_TABLE_T Table;  // Element or float

FATTN_CONSTEXPR int kRotaryDim = FATTN_ROTARY_DIM;
FATTN_CONSTEXPR int kOffset = FATTN_ROTARY_OFFSET;  // the first rotated column
FATTN_CONSTEXPR int kPairs = kRotaryDim / 2;
FATTN_CONSTEXPR int kStyle = FATTN_ROTARY_STYLE;
// Whether a lane's four columns are loaded together, as their partners are.
FATTN_CONSTEXPR bool kPairsAligned = kOffset % kLaneColumns == 0 && kPairs % kLaneColumns == 0;

// A product that is rounded before it is added: a compiler may contract x * y + z, but not this.
inline float rounded_product(float x, float y) {
  return is_same_v<Table, Element> && !is_same_v<Element, float> ? rounded(x * y) : fma(x, y, 0.0f * y);
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

// Numbers of a source for four neighbouring columns of the result: the numbers at the same place in their
// pairs, and the other numbers of these pairs.
struct LanePairs {
  float own[kLaneColumns];
  float other[kLaneColumns];

  template <typename T>
  void load(const device T* source, int column) thread {
    if (fc_vector_loads && kPairsAligned) {
      const bool rotated = is_rotated(column), second = rotated && is_second(column);
      const bool apart = rotated && kStyle != kStylePairs;
      const bool interleaved = apart && kStyle == kStylePairsToHalves;
      const int first = interleaved ? source_of(pair_of(column), false) : column;
      load_columns(source, first, own);
      load_columns(source,
                   interleaved ? first + kLaneColumns
                   : apart     ? source_of(pair_of(column), !second)
                               : column,
                   other);
      const float even[kLaneColumns] = {own[0], own[2], other[0], other[2]};
      const float odd[kLaneColumns] = {own[1], own[3], other[1], other[3]};
      const float swapped[kLaneColumns] = {own[1], own[0], own[3], own[2]};
      FATTN_UNROLL
      for (int e = 0; e < kLaneColumns; e++) {
        if (kStyle == kStylePairs) {
          other[e] = swapped[e];
        } else if (interleaved) {
          own[e] = second ? odd[e] : even[e];
          other[e] = second ? even[e] : odd[e];
        }
      }
      return;
    }
    FATTN_UNROLL
    for (int e = 0; e < kLaneColumns; e++) {
      const int c = column + e;
      const bool rotated = is_rotated(c);
      own[e] = float(source[rotated ? source_of(pair_of(c), is_second(c)) : c]);
      other[e] = rotated ? float(source[source_of(pair_of(c), !is_second(c))]) : 0.0f;
    }
  }
};

// A position's rows of the tables.
struct Angles {
  const device Table* cosines;
  const device Table* sines;
  TableStrides cos;
  TableStrides sin;

  // The rotated number at `column` of the result.
  float turned(int column, float own, float other) const thread {
    const bool second = is_second(column);
    const int pair = pair_of(column);
    const float cosine = float(cosines[pair * cos.column + (second ? cos.second : 0)]);
    const float sine = float(sines[pair * sin.column + (second ? sin.second : 0)]);
    return rounded(rounded_product(own, cosine) + rounded_product(second ? other : -other, sine));
  }
};

// Loads, normalises and rotates a row of queries or keys.
inline void make_row(thread LaneRow<kHeadDim>& row, const device Element* source, const device Weight* weight,
                     bool has_norm, float eps, thread const Angles& angles, ushort lane) {
  LanePairs pairs[(kHeadDim + kPassColumns - 1) / kPassColumns];
  float sum = 0.0f;
  FATTN_UNROLL
  for (int pass = 0; pass * kPassColumns < kHeadDim; pass++) {
    const int column = pass * kPassColumns + lane * kLaneColumns;
    if (column < kHeadDim) {
      pairs[pass].load(source, column);
      FATTN_UNROLL
      for (int e = 0; e < kLaneColumns; e++) {
        sum += pairs[pass].own[e] * pairs[pass].own[e];
      }
    }
  }
  const float scale = has_norm ? inverse_rms(simd_sum(sum), kHeadDim, eps) : 1.0f;
  FATTN_UNROLL
  for (int pass = 0; pass * kPassColumns < kHeadDim; pass++) {
    const int column = pass * kPassColumns + lane * kLaneColumns;
    FATTN_UNROLL
    for (int e = 0; e < kLaneColumns; e++) {
      row.x[pass][e] = 0.0f;
    }
    if (column >= kHeadDim) {
      continue;
    }
    if (has_norm) {
      LanePairs weights;
      weights.load(weight, column);
      FATTN_UNROLL
      for (int e = 0; e < kLaneColumns; e++) {
        pairs[pass].own[e] = rounded(normed(pairs[pass].own[e], scale, weights.own[e]));
        pairs[pass].other[e] = rounded(normed(pairs[pass].other[e], scale, weights.other[e]));
      }
    }
    FATTN_UNROLL
    for (int e = 0; e < kLaneColumns; e++) {
      const float own = pairs[pass].own[e];
      row.x[pass][e] = is_rotated(column + e) ? angles.turned(column + e, own, pairs[pass].other[e]) : own;
    }
  }
}

inline long offset_in(constant Strides3& strides, int batch, int head, int position) {
  return batch * strides.batch + head * strides.head + position * strides.row;
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
  const int heads = params.q_heads + params.kv_heads * (fc_values ? 2 : 1);
  const int row_index = int(group.x) * kSimdgroups + simdgroup_index;
  if (row_index >= params.rows) {
    return;
  }
  const int token = row_index / heads;
  const int batch = token / params.q_len;
  const int position = token - batch * params.q_len;
  int head = row_index - token * heads;
  Angles angles;
  angles.cosines = cosines + batch * params.cos.batch + position * params.cos.row;
  angles.sines = sines + batch * params.sin.batch + position * params.sin.row;
  angles.cos = params.cos;
  angles.sin = params.sin;
  const device Weight* weight = nullptr;
  LaneRow<kHeadDim> row;
  if (head < params.q_heads) {
    if (fc_query_norm) {
      weight = query_norm;
    }
    const device Element* source = query + offset_in(params.query, batch, head, position);
    make_row(row, source, weight, fc_query_norm, params.eps, angles, lane);
    store_row(row, out + offset_in(params.out, batch, head, position), lane);
    return;
  }
  head -= params.q_heads;
  long slot = batch * params.slot_batch + params.start + position;
  if (fc_slots) {
    slot = slot_mapping[batch * params.slot_batch + position * params.slot_row];
  }
  bool is_dropped = slot < 0 || slot >= params.slots;
  if (fc_starts) {
    // Compared before it is added: the sum of two 64-bit numbers may overflow.
    const long start = starts[batch * params.starts_batch];
    is_dropped = start < 0 || start >= params.slot_batch - params.start - position;
    slot += start;
  }
  if (is_dropped) {
    return;
  }
  const SlotPlace place = place_of(slot, params.block_size);
  device Scale* scales = nullptr;
  if (head < params.kv_heads) {
    if (fc_key_norm) {
      weight = key_norm;
    }
    const device Element* source = key + offset_in(params.key, batch, head, position);
    make_row(row, source, weight, fc_key_norm, params.eps, angles, lane);
    device Stored* target = key_cache + offset_of(place, head, params.key_cache);
    if (kFormat == kKvFloat) {
      store_row(row, target, lane);
      return;
    }
    FATTN_UNROLL
    for (int pass = 0; pass * kPassColumns < kHeadDim; pass++) {
      FATTN_UNROLL
      for (int e = 0; e < kLaneColumns; e++) {
        row.x[pass][e] = flushed(row.x[pass][e]);
      }
    }
    if (fc_scales) {
      scales = key_scales + offset_of(place, head, params.key_scales);
    }
    write_quantised_row<kHeadDim>(row, target, scales, lane);
    return;
  }
  head -= params.kv_heads;
  if (fc_scales) {
    scales = value_scales + offset_of(place, head, params.value_scales);
  }
  write_row<kValueDim>(value + offset_in(params.value, batch, head, position),
                       value_cache + offset_of(place, head, params.value_cache), scales, lane);
}
