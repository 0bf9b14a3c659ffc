// One step of decode_vector: 32 scores of one or two rows, one per lane. Each lane reads its columns of their
// keys and values.
#pragma once

#include "decode_state.h"
#include "lane_columns.h"

namespace fattn {

typedef LaneColumns<kHeadDim> KeyColumns;
typedef LaneColumns<kValueDim> ValueColumns;
typedef LaneRowOf<kHeadDim, kKvFormat>::type LaneKey;
typedef LaneRowOf<kValueDim, kKvFormat>::type LaneValue;

// Keys or values that a lane loads before it uses the first: 64 bytes, or one key.
constexpr int rows_at_once(int columns) {
  const int bytes = columns * 4 / kStoredWordElements + (kGroups ? 2 * sizeof(Scale) : 0);
  return chunk_of(kLaneKeys, bytes < 64 ? 64 / bytes : 1);
}
FATTN_CONSTEXPR int kKeysAtOnce = rows_at_once(KeyColumns::kAll);
FATTN_CONSTEXPR int kValuesAtOnce = rows_at_once(ValueColumns::kAll);

// The type in which a lane holds a query row. half operands need no conversion.
template <typename T>
struct HeldAs {
  typedef float type;
};
template <>
struct HeldAs<half> {
  typedef half type;
};
typedef HeldAs<Element>::type HeldElement;

// A lane's columns of the query rows.
struct VectorQuery {
  HeldElement elements[kPackedRows][KeyColumns::kAll];
  float sums[kPackedRows][KeyColumns::kChunks];  // int4: of a chunk's elements

  void load(thread const Operands& operands, constant DecodeParams& params, RowBlock block, int batch,
            VectorLane at) thread {
    constexpr int kRead = KeyColumns::kChunk < kWideChunk ? KeyColumns::kChunk : kWideChunk;
    FATTN_UNROLL
    for (int r = 0; r < kPackedRows; r++) {
      const PackedRow packed = packed_row(params, block, r);
      const device Element* row = packed.of_query(operands.query, params, batch);
      Operand run[KeyColumns::kAll];
      FATTN_UNROLL
      for (int i = 0; i < KeyColumns::kAll; i += kRead) {
        const int column = KeyColumns::first(i / KeyColumns::kChunk, at) + i % KeyColumns::kChunk;
        read_elements<kRead>(row + column, fc_vector_loads, run, i);
      }
      FATTN_UNROLL
      for (int c = 0; c < KeyColumns::kChunks; c++) {
        sums[r][c] = 0.0f;
        FATTN_UNROLL
        for (int i = c * KeyColumns::kChunk; i < (c + 1) * KeyColumns::kChunk; i++) {
          elements[r][i] = HeldElement(run[i]);
          sums[r][c] += float(run[i]);
        }
      }
    }
  }

  // This lane's part of the product of each row with a key.
  void multiply(thread const LaneKey& key, VectorLane at, thread float (&products)[kPackedRows]) const
      thread {
    FATTN_UNROLL
    for (int r = 0; r < kPackedRows; r++) {
      products[r] = 0.0f;
    }
    FATTN_UNROLL
    for (int c = 0; c < KeyColumns::kChunks; c++) {
      float run[KeyColumns::kChunk];
      key.unpack(c, run);
      const LaneGroup group = key.group(c);
      const bool exists = c < KeyColumns::kWhole || KeyColumns::exists(c, at);
      FATTN_UNROLL
      for (int r = 0; r < kPackedRows; r++) {
        float sum = kGroups ? 0.0f : products[r];
        FATTN_UNROLL
        for (int e = 0; e < KeyColumns::kChunk; e++) {
          sum = fma(float(elements[r][c * KeyColumns::kChunk + e]), run[e], sum);
        }
        if (kGroups) {
          sum = products[r] + fma(sum, group.scale, scaled_product(sums[r][c], group.middle));
        }
        products[r] = exists ? sum : products[r];
      }
    }
  }
};

// The online softmax (softmax.h) of a simdgroup with one score per lane.
struct VectorAttention {
  float row_max;                                      // of this lane's row
  float row_sum;                                      // of this lane's weights
  float out[kPackedRows][ValueColumns::kAll];         // this lane's columns, over its keys
  float middles[kPackedRows][ValueColumns::kChunks];  // int4: to be added to a chunk's columns

  void clear() thread {
    row_max = -INFINITY;
    row_sum = 0.0f;
    FATTN_UNROLL
    for (int r = 0; r < kPackedRows; r++) {
      FATTN_UNROLL
      for (int i = 0; i < ValueColumns::kAll; i++) {
        out[r][i] = 0.0f;
      }
      FATTN_UNROLL
      for (int c = 0; c < ValueColumns::kChunks; c++) {
        middles[r][c] = 0.0f;
      }
    }
  }

  // As AttentionState::add_sink.
  void add_sink(float logit, bool counts) thread {
    row_max = logit;
    row_sum = counts ? (logit < INFINITY ? 1.0f : NAN) : 0.0f;
  }

  // Returns the weight of this lane's score, and rescales the state to the new maximum, as
  // AttentionState::to_weights does.
  float to_weight(float score) thread {
    const float new_max = fmax(row_max, max_of_row(score));
    const float origin = new_max == -INFINITY ? 0.0f : new_max;
    const float shrunk = weight_of(row_max - origin);
    const float shrink = row_max == new_max ? 1.0f : shrunk;
    const float weight = weight_of(score - origin);
    row_max = new_max;
    row_sum = row_sum * shrink + weight;
    FATTN_UNROLL
    for (int r = 0; r < kPackedRows; r++) {
      const float row_shrink = kPackedRows == 1 ? shrink : simd_shuffle(shrink, VectorLane::of_row(r));
      FATTN_UNROLL
      for (int i = 0; i < ValueColumns::kAll; i++) {
        out[r][i] *= row_shrink;
      }
      FATTN_UNROLL
      for (int c = 0; c < ValueColumns::kChunks; c++) {
        middles[r][c] *= row_shrink;
      }
    }
    return weight;
  }

  void add_value(thread const LaneValue& value, thread const float (&weights)[kPackedRows]) thread {
    FATTN_UNROLL
    for (int c = 0; c < ValueColumns::kChunks; c++) {
      float run[ValueColumns::kChunk];
      value.unpack(c, run);
      const LaneGroup group = value.group(c);
      FATTN_UNROLL
      for (int r = 0; r < kPackedRows; r++) {
        const float weight = kGroups ? weights[r] * group.scale : weights[r];
        if (kGroups) {
          middles[r][c] = fma(weights[r], group.middle, middles[r][c]);
        }
        FATTN_UNROLL
        for (int e = 0; e < ValueColumns::kChunk; e++) {
          const int i = c * ValueColumns::kChunk + e;
          out[r][i] = fma(weight, run[e], out[r][i]);
        }
      }
    }
  }

  // After the last step: sums over all lanes. Each lane keeps the first kOwnColumns of `out`.
  void finish(VectorLane at) thread {
    row_sum = sum_of_row(row_sum);
    FATTN_UNROLL
    for (int r = 0; r < kPackedRows; r++) {
      if (kGroups) {
        FATTN_UNROLL
        for (int i = 0; i < ValueColumns::kAll; i++) {
          out[r][i] += middles[r][i / ValueColumns::kChunk];
        }
      }
      scatter_sums<kKeysAbreast, kKeyLanes>(out[r], at.lane);
    }
  }
  static constant constexpr int kOwnColumns = ValueColumns::kAll / kKeysAbreast;
  static int own_column(int i, VectorLane at) {
    // The last chunks may lie past the end.
    const int first = at.lane / kKeyLanes * kOwnColumns;
    return ValueColumns::column(first + i, at);
  }
};

// The place of a lane's key number i.
inline KeyPlace find_key(thread const Sequence& sequence, thread const StepKeys& step, int i, VectorLane at) {
  const int first = i * kKeysAbreast;
  return step.find(sequence.table, first / 8, first % 8 + at.lane / kKeyLanes);
}

// The offsets of the scales of sequence and head, saved for the steps.
struct StepScales {
  threadgroup SavedScales* saved;  // of this simdgroup

  void write(thread const Sequence& sequence, constant DecodeParams& params, ushort lane) const thread {
    if (fc_scales && lane == 0) {
      KeyPlace first;
      first.block = first.slot = 0;
      saved->key = sequence.key.scales_at(first, params.key_scales) - sequence.key.scales;
      saved->value = sequence.value.scales_at(first, params.value_scales) - sequence.value.scales;
    }
  }
  StoredOperand key(thread const Sequence& sequence) const thread {
    return moved(sequence.key, fc_scales ? saved->key : 0);
  }
  StoredOperand value(thread const Sequence& sequence) const thread {
    return moved(sequence.value, fc_scales ? saved->value : 0);
  }

 private:
  static StoredOperand moved(thread const StoredOperand& operand, long distance) {
    StoredOperand moved;
    moved.elements = operand.elements;
    moved.first = operand.first;
    moved.scales = fc_scales ? operand.scales + distance : nullptr;
    moved.batch = moved.head = 0;
    return moved;
  }
};

// Iterates over the rows of K or V of a lane's keys in a step. All lanes call it. If the keys of a step are
// contiguous, one addition leads from row to row.
template <typename Columns>
struct LaneRows {
  StoredRow row;

  void find(int i, thread const StoredOperand& operand, constant Strides3& strides,
            constant Strides3& scale_strides, thread const Sequence& sequence, thread const StepKeys& step,
            VectorLane at) thread {
    const bool together = !fc_paged || fc_block_size % kTileKeys == 0;
    if (together && i > 0) {
      row.elements += kKeysAbreast * strides.row;
      if (kGroups) {
        row.groups += kKeysAbreast * scale_strides.row;
      }
      return;
    }
    row = operand.row_at(find_key(sequence, step, i, at), strides, scale_strides);
    row.elements += Columns::first(0, at) / packed_elements(kKvFormat);
    if (kGroups) {
      row.groups += Columns::first(0, at) / kInt4Group * 2;
    }
  }
};

// The score of this lane: the sum over all columns, modified; -inf if the key is hidden from the row. Bit n
// of `seen`: the key of lane n's score is visible to its row.
template <bool kWhole>
inline float vector_score(thread const VectorQuery& query, thread const Sequence& sequence,
                          thread const StoredOperand& stored, thread const StepKeys& step,
                          thread const DecodeState& state, constant DecodeParams& params, VectorLane at,
                          float key_scale, thread uint& seen) {
  float products[kPackedRows * kLaneKeys];
  LaneRows<KeyColumns> rows;
  FATTN_UNROLL
  for (int first = 0; first < kLaneKeys; first += kKeysAtOnce) {
    LaneKey keys[kKeysAtOnce];
    FATTN_UNROLL
    for (int n = 0; n < kKeysAtOnce; n++) {
      rows.find(first + n, stored, params.key, params.key_scales, sequence, step, at);
      if (kWhole || find_key(sequence, step, first + n, at).exists) {
        keys[n].read(rows.row, at);
      } else {
        keys[n].clear();
      }
    }
    FATTN_UNROLL
    for (int n = 0; n < kKeysAtOnce; n++) {
      float of_rows[kPackedRows];
      query.multiply(keys[n], at, of_rows);
      FATTN_UNROLL
      for (int r = 0; r < kPackedRows; r++) {
        products[r * kLaneKeys + first + n] = of_rows[r];
      }
    }
  }
  scatter_sums<kKeyLanes, 1>(products, at.lane);
  const int key = step.first_key + at.own_key();
  const ScoreModifiers modifiers = state.modifiers(sequence, params, at.saved);
  const float product = kRowScales && fc_scales ? scaled_product(products[0], key_scale) : products[0];
  float score = modified_score(product, modifiers, 0, key);
  if (!kWhole) {
    const bool exists = step.find(sequence.table, at.own_key()).exists;
    const Visibility visible = state.visible(params, at.saved);
    const bool sees = sees_key(score, visible, sequence.mask, 0, key, exists);
    seen = uint(simd_vote::vote_t(simd_ballot(sees)));
    score = sees ? score : -INFINITY;
  }
  return score;
}

// The weights of a step in threadgroup memory: a lane needs the weights of all its keys, and reads several
// with one load. A shuffle whose source differs between lanes costs four on M1 and M2.
struct SharedWeights {
  threadgroup float4* lanes;  // four lanes each

  void write(float weight, VectorLane at) const thread {
    simdgroup_barrier(mem_flags::mem_threadgroup);  // the previous weights have been read
    reinterpret_cast<threadgroup float*>(lanes)[at.lane] = weight;
    simdgroup_barrier(mem_flags::mem_threadgroup);
  }
  // Reads the weights of this lane's keys from key `first` on.
  template <int N>
  void read(thread float (&weights)[N], int row, int first, VectorLane at) const thread {
    const int from = at.first() + row * kLaneKeys + first;
    constexpr int kLoad = N % 4 == 0 ? 4 : 1;
    FATTN_UNROLL
    for (int n = 0; n < N; n += kLoad) {
      const float4 four = lanes[(from + n) / 4];
      FATTN_UNROLL
      for (int i = 0; i < kLoad; i++) {
        weights[n + i] = kLoad == 4 ? four[i] : reinterpret_cast<const threadgroup float*>(lanes)[from + n];
      }
    }
  }
};

// One step of kTileKeys keys. !kWhole: some key may not exist or not be visible to some row.
template <bool kWhole>
inline void vector_step(thread VectorAttention& attention, thread const VectorQuery& query,
                        thread Sequence& sequence, thread const SharedWeights& weights,
                        thread const StepScales& scales, thread const StepKeys& step,
                        thread const DecodeState& state, constant DecodeParams& params, VectorLane at) {
  uint seen = ~0u;
  state.take_key_start(sequence);
  const StoredOperand keys = scales.key(sequence);
  float key_scale = 1.0f, value_scale = 1.0f;  // of the key of this lane's score
  if (kRowScales && fc_scales) {
    const KeyPlace place = step.find(sequence.table, at.own_key());
    const bool read = kWhole || place.exists;
    const StoredOperand scaled_values = scales.value(sequence);
    key_scale = keys.row_scale(place, params.key_scales, read);
    value_scale = scaled_values.row_scale(place, params.value_scales, read);
  }
  const float score = vector_score<kWhole>(query, sequence, keys, step, state, params, at, key_scale, seen);
  float weight = attention.to_weight(score);
  if (kRowScales && fc_scales) {
    weight *= kWhole || (seen >> at.lane) & 1 ? value_scale : 0.0f;
  }
  weights.write(weight, at);
  state.take_value_start(sequence);
  const StoredOperand stored = scales.value(sequence);
  LaneRows<ValueColumns> rows;
  const uint seen_here = seen >> at.first();  // bit row * kLaneKeys + i: this lane's key i
  FATTN_UNROLL
  for (int first = 0; first < kLaneKeys; first += kValuesAtOnce) {
    LaneValue values[kValuesAtOnce];
    FATTN_UNROLL
    for (int n = 0; n < kValuesAtOnce; n++) {
      rows.find(first + n, stored, params.value, params.value_scales, sequence, step, at);
      // A hidden value may be NaN, and 0 * NaN is NaN: skip it.
      const uint by_rows = (1u | 1u << ((kPackedRows - 1) * kLaneKeys)) << (first + n);
      if (kWhole || (seen_here & by_rows) != 0) {
        values[n].read(rows.row, at);
      } else {
        values[n].clear();
      }
    }
    float of_rows[kPackedRows][kValuesAtOnce];
    FATTN_UNROLL
    for (int r = 0; r < kPackedRows; r++) {
      weights.read(of_rows[r], r, first, at);
    }
    FATTN_UNROLL
    for (int n = 0; n < kValuesAtOnce; n++) {
      float of_value[kPackedRows];
      FATTN_UNROLL
      for (int r = 0; r < kPackedRows; r++) {
        of_value[r] = of_rows[r][n];
      }
      attention.add_value(values[n], of_value);
    }
  }
}

}  // namespace fattn
