// RMS norm of query and key heads, rotary embedding, and the write of keys and values into a cache, with the
// roundings of transformers. A simdgroup takes one or several heads of a token: of the query, key or value.
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
// Whether a simdgroup holds the factors of all columns, and so takes several heads with them.
FATTN_CONSTEXPR bool kOnePass = kHeadDim <= kPassColumns;
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

// Loads the other numbers of the pairs of four neighbouring columns of the result. `own` holds these columns
// of the source, and then the numbers at the same place in the pairs.
template <typename T>
inline void load_others(const device T* source, int column, thread float (&own)[kLaneColumns],
                        thread float (&other)[kLaneColumns]) {
  if (kPairsAligned && kStyle == kStyleHalves) {
    load_columns(source, is_rotated(column) ? source_of(pair_of(column), !is_second(column)) : column,
                 fc_vector_loads, other);
    return;
  }
  FATTN_UNROLL
  for (int e = 0; e < kLaneColumns; e++) {
    const int c = column + e;
    if (kPairsAligned && kStyle == kStylePairs) {
      other[e] = own[e ^ 1];
      continue;
    }
    other[e] = float(source[is_rotated(c) ? source_of(pair_of(c), !is_second(c)) : c]);
    if (kStyle == kStylePairsToHalves) {
      own[e] = float(source[is_rotated(c) ? source_of(pair_of(c), is_second(c)) : c]);
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

// A head of queries or keys, four columns of a lane at a time. Wide ones are read twice and load their
// factors again in each pass: all columns would not fit in registers.
struct Head {
  const device Element* source;
  const device Table* cosines;
  const device Table* sines;
  const device Weight* weight;
  bool has_norm;
  float scale;
  float own[kLaneColumns], other[kLaneColumns];
  float cosine[kLaneColumns], sine[kLaneColumns];
  float own_weight[kLaneColumns], other_weight[kLaneColumns];

  void load_rotation(int column, constant RotaryParams& params) thread {
    load_factors(cosines, params.cos, column, cosine);
    load_factors(sines, params.sin, column, sine);
    FATTN_UNROLL
    for (int e = 0; e < kLaneColumns; e++) {
      sine[e] = is_second(column + e) ? sine[e] : -sine[e];
    }
  }

  void load_weights(int column) thread {
    if (has_norm) {
      load_columns(weight, column, fc_vector_loads, own_weight);
      load_others(weight, column, own_weight, other_weight);
    }
  }

  void load_scale(float eps, ushort lane) thread {
    float squares = 0.0f;
    for (int column = lane * kLaneColumns; column < kHeadDim; column += kPassColumns) {
      load_columns(source, column, fc_vector_loads, own);
      FATTN_UNROLL
      for (int e = 0; e < kLaneColumns; e++) {
        squares += own[e] * own[e];
      }
    }
    scale = has_norm ? inverse_rms(simd_sum(squares), kHeadDim, eps) : 1.0f;
  }

  // Normalises and rotates `own`.
  void make(int column, constant RotaryParams& params) thread {
    if (!kOnePass) {
      load_columns(source, column, fc_vector_loads, own);
      load_weights(column);
    }
    load_others(source, column, own, other);
    FATTN_UNROLL
    for (int e = 0; e < kLaneColumns; e++) {
      if (has_norm) {
        own[e] = rounded(normed(own[e], scale, own_weight[e]));
        other[e] = rounded(normed(other[e], scale, other_weight[e]));
      }
    }
    if (!kOnePass) {
      load_rotation(column, params);
    }
    FATTN_UNROLL
    for (int e = 0; e < kLaneColumns; e++) {
      const float turned = rounded(rounded_product(own[e], cosine[e]) + rounded_product(other[e], sine[e]));
      own[e] = is_rotated(column + e) ? turned : own[e];
    }
  }

  template <typename T>
  void store(device T* target, constant RotaryParams& params, ushort lane) thread {
    for (int column = lane * kLaneColumns; column < kHeadDim; column += kPassColumns) {
      make(column, params);
      store_columns(target, column, own);
    }
  }

  void quantise(device Stored* target, device Scale* scales, constant RotaryParams& params, ushort lane)
      thread {
    LaneRow<kHeadDim> row = {};
    FATTN_UNROLL
    for (int pass = 0; pass * kPassColumns < kHeadDim; pass++) {
      const int column = pass * kPassColumns + lane * kLaneColumns;
      if (column >= kHeadDim) {
        continue;
      }
      make(column, params);
      FATTN_UNROLL
      for (int e = 0; e < kLaneColumns; e++) {
        row.x[pass][e] = own[e];
      }
    }
    write_quantised_row<kHeadDim>(row, target, scales, lane);
  }
};

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
    constant RotaryParams& params [[buffer(fattn::kSlotParams)]], uint group [[threadgroup_position_in_grid]],
    ushort simdgroup_index [[simdgroup_index_in_threadgroup]], ushort lane [[thread_index_in_simdgroup]]) {
  const uint units_of_token = params.q_units + params.kv_units * (fc_values ? 2 : 1);
  const uint unit = group * kSimdgroups + simdgroup_index;
  const int index = int(unit / units_of_token);
  if (index >= params.tokens) {
    return;
  }
  const int batch = index / params.q_len, position = index - batch * params.q_len;
  int head = int(unit % units_of_token);
  const bool is_query = head < params.q_units;
  head -= is_query ? 0 : params.q_units;
  const bool is_value = fc_values && !is_query && head >= params.kv_units;
  head -= is_value ? params.kv_units : 0;
  const int heads = is_query ? params.q_heads : params.kv_heads;
  const int units = is_query ? params.q_units : params.kv_units;

  const SlotPlace token = {batch, position};
  SlotPlace place = {batch, position + (is_query ? 0 : params.start)};
  if (fc_slots && !is_query) {
    const long slot = slot_mapping[batch * params.slot_batch + position * params.slot_row];
    if (slot < 0 || slot >= params.slots) {
      return;
    }
    place = place_of(slot, params.block_size);
  }
  if (fc_starts && !is_query) {
    const long start = starts[batch * params.slot_batch];
    if (start < 0 || start >= params.block_size - place.slot) {
      return;
    }
    place.slot += start;
  }
  constant Strides3& from = is_query ? params.query : is_value ? params.value : params.key;
  constant Strides3& to = is_query ? params.out : is_value ? params.value_cache : params.key_cache;
  long source = offset_of(token, head, from), target = offset_of(place, head, to);

  const long source_step = units * from.head, target_step = units * to.head;
  if (is_value) {
    for (; head < heads; head += units) {
      device Scale* scales = nullptr;
      if (fc_scales) {
        scales = value_scales + offset_of(place, head, params.value_scales);
      }
      write_row<kValueDim>(value + source, value_cache + target, scales, lane);
      source += source_step;
      target += target_step;
    }
    return;
  }

  Head rotated;
  rotated.source = (is_query ? query : key) + source;
  rotated.cosines = cosines + batch * params.cos.batch + position * params.cos.row;
  rotated.sines = sines + batch * params.sin.batch + position * params.sin.row;
  rotated.has_norm = is_query ? fc_query_norm : fc_key_norm;
  if (fc_query_norm && is_query) {
    rotated.weight = query_norm;
  }
  if (fc_key_norm && !is_query) {
    rotated.weight = key_norm;
  }
  if (lane * kLaneColumns < kHeadDim) {
    rotated.load_rotation(lane * kLaneColumns, params);
    rotated.load_weights(lane * kLaneColumns);
  }
  for (; head < heads; head += units) {
    rotated.load_scale(params.eps, lane);
    if (is_query) {
      rotated.store(out + target, params, lane);
    } else if (kFormat == kKvFloat) {
      rotated.store(key_cache + target, params, lane);
    } else {
      device Scale* scales = nullptr;
      if (fc_scales) {
        scales = key_scales + offset_of(place, head, params.key_scales);
      }
      rotated.quantise(key_cache + target, scales, params, lane);
    }
    if (!kOnePass) {
      return;  // wide heads have a simdgroup each, and need no registers for a loop
    }
    rotated.source += source_step;
    target += target_step;
  }
}
