// One step of decode_vector: 32 scores of one or two rows, one for each lane, and the keys and values they
// belong to, of which each lane reads its columns.
#pragma once

#include "decode_state.h"
#include "lane_columns.h"

namespace fattn {

typedef LaneColumns<kHeadDim> KeyColumns;
typedef LaneColumns<kValueDim> ValueColumns;
typedef LaneRow<kHeadDim> LaneKey;
typedef LaneRow<kValueDim> LaneValue;

// Keys, or values, that a lane requests before it uses the first: 64 bytes, or one key.
constexpr int rows_at_once(int chunks) { return chunk_of(kLaneKeys, chunks < 4 ? 4 / chunks : 1); }
FATTN_CONSTEXPR int kKeysAtOnce = rows_at_once(KeyColumns::kChunks);
FATTN_CONSTEXPR int kValuesAtOnce = rows_at_once(ValueColumns::kChunks);

// A lane's columns of the query rows.
struct VectorQuery {
  float elements[kPackedRows][KeyColumns::kAll];

  void load(thread const Operands& operands, constant DecodeParams& params, RowBlock block, int batch,
            VectorLane at) thread {
#pragma clang loop unroll(full)
    for (int r = 0; r < kPackedRows; r++) {
      const PackedRow packed = packed_row(params, block, r);
      LaneKey row;
      row.read(packed.of_query(operands.query, params, batch), at);
#pragma clang loop unroll(full)
      for (int c = 0; c < KeyColumns::kChunks; c++) {
        float run[kLaneChunk];
        row.unpack(c, run);
#pragma clang loop unroll(full)
        for (int e = 0; e < kLaneChunk; e++) {
          elements[r][c * kLaneChunk + e] = run[e];
        }
      }
    }
  }

  // This lane's part of the product of each row with a key.
  void multiply(thread const LaneKey& key, VectorLane at, thread float (&products)[kPackedRows]) const
      thread {
#pragma clang loop unroll(full)
    for (int r = 0; r < kPackedRows; r++) {
      products[r] = 0.0f;
    }
#pragma clang loop unroll(full)
    for (int c = 0; c < KeyColumns::kChunks; c++) {
      float run[kLaneChunk];
      key.unpack(c, run);
      const bool exists = c < KeyColumns::kWhole || KeyColumns::exists(c, at);
#pragma clang loop unroll(full)
      for (int r = 0; r < kPackedRows; r++) {
        float sum = products[r];
#pragma clang loop unroll(full)
        for (int e = 0; e < kLaneChunk; e++) {
          sum = fma(elements[r][c * kLaneChunk + e], run[e], sum);
        }
        products[r] = exists ? sum : products[r];
      }
    }
  }
};

// The online softmax (softmax.h) of a simdgroup whose lanes have one score each.
struct VectorAttention {
  float row_max;                               // of the row whose scores this lane has
  float row_sum;                               // of this lane's weights
  float out[kPackedRows][ValueColumns::kAll];  // this lane's columns, of its keys

  void clear() thread {
    row_max = -INFINITY;
    row_sum = 0.0f;
#pragma clang loop unroll(full)
    for (int r = 0; r < kPackedRows; r++) {
#pragma clang loop unroll(full)
      for (int i = 0; i < ValueColumns::kAll; i++) {
        out[r][i] = 0.0f;
      }
    }
  }

  // As AttentionState::add_sink.
  void add_sink(float logit, bool counts) thread {
    row_max = logit;
    row_sum = counts ? (logit < INFINITY ? 1.0f : NAN) : 0.0f;
  }

  // The weight of this lane's score; turns the state over to the new running maximum, as
  // AttentionState::weigh.
  float weigh(float score) thread {
    const float new_max = fmax(row_max, max_of_row(score));
    const float origin = new_max == -INFINITY ? 0.0f : new_max;
    const float shrunk = weight_of(row_max - origin);
    const float shrink = row_max == new_max ? 1.0f : shrunk;
    const float weight = weight_of(score - origin);
    row_max = new_max;
    row_sum = row_sum * shrink + weight;
#pragma clang loop unroll(full)
    for (int r = 0; r < kPackedRows; r++) {
      const float row_shrink = kPackedRows == 1 ? shrink : simd_shuffle(shrink, VectorLane::of_row(r));
#pragma clang loop unroll(full)
      for (int i = 0; i < ValueColumns::kAll; i++) {
        out[r][i] *= row_shrink;
      }
    }
    return weight;
  }

  void add_value(thread const LaneValue& value, thread const float (&weights)[kPackedRows]) thread {
#pragma clang loop unroll(full)
    for (int c = 0; c < ValueColumns::kChunks; c++) {
      float run[kLaneChunk];
      value.unpack(c, run);
#pragma clang loop unroll(full)
      for (int r = 0; r < kPackedRows; r++) {
#pragma clang loop unroll(full)
        for (int e = 0; e < kLaneChunk; e++) {
          out[r][c * kLaneChunk + e] = fma(weights[r], run[e], out[r][c * kLaneChunk + e]);
        }
      }
    }
  }

  // After the last step: the sums of all lanes. Of `out`, a lane keeps the first kOwnColumns.
  void finish(VectorLane at) thread {
    row_sum = sum_of_row(row_sum);
#pragma clang loop unroll(full)
    for (int r = 0; r < kPackedRows; r++) {
      scatter_sums<kKeysAbreast, kKeyLanes>(out[r], at.lane);
    }
  }
  static constant constexpr int kOwnColumns = ValueColumns::kAll / kKeysAbreast;
  static int own_column(int i, VectorLane at) {
    // The last chunks may lie past the end, and so may a whole part of them.
    const int first = at.lane / kKeyLanes * kOwnColumns;
    return ValueColumns::column(first + i, at);
  }
};

// The place of a lane's key number i.
inline KeyPlace find_key(thread const Sequence& sequence, thread const StepKeys& step, int i, VectorLane at) {
  const int first = i * kKeysAbreast;
  return step.find(sequence.table, first / 8, first % 8 + at.lane / kKeyLanes);
}

// In all lanes at once: the row of K or V of a lane's key number i. Where the keys of a step lie together,
// rows are counted from the lane's first: each address is one addition.
inline const device Element* row_of(thread const StoredOperand& operand, constant Strides3& strides,
                                    thread const Sequence& sequence, thread const StepKeys& step, int i,
                                    VectorLane at) {
  const bool together = !fc_paged || fc_block_size % kTileKeys == 0;
  const KeyPlace place = find_key(sequence, step, together ? 0 : i, at);
  const StoredRow row = operand.row_at(place, strides, strides);
  return row.floats() + (together ? i * (kKeysAbreast * strides.row) : 0);
}

// The score of this lane: the sum of all columns, modified; -inf if the row does not see the key. Bit n of
// `seen`: lane n has a score of a key that its row sees.
template <bool kWhole>
inline float vector_score(thread const VectorQuery& query, thread const Sequence& sequence,
                          thread const StepKeys& step, thread const DecodeState& state,
                          constant DecodeParams& params, VectorLane at, thread uint& seen) {
  float products[kPackedRows * kLaneKeys];
#pragma clang loop unroll(full)
  for (int first = 0; first < kLaneKeys; first += kKeysAtOnce) {
    LaneKey keys[kKeysAtOnce];
#pragma clang loop unroll(full)
    for (int n = 0; n < kKeysAtOnce; n++) {
      const device Element* row = row_of(sequence.key, params.key, sequence, step, first + n, at);
      if (kWhole || find_key(sequence, step, first + n, at).exists) {
        keys[n].read(row, at);
      } else {
        keys[n].clear();
      }
    }
#pragma clang loop unroll(full)
    for (int n = 0; n < kKeysAtOnce; n++) {
      float of_rows[kPackedRows];
      query.multiply(keys[n], at, of_rows);
#pragma clang loop unroll(full)
      for (int r = 0; r < kPackedRows; r++) {
        products[r * kLaneKeys + first + n] = of_rows[r];
      }
    }
  }
  scatter_sums<kKeyLanes, 1>(products, at.lane);
  const int key = step.first_key + at.own_key();
  const ScoreModifiers modifiers = state.modifiers(sequence, params, at.saved);
  float score = modified_score(products[0], modifiers, 0, key);
  if (!kWhole) {
    const bool exists = step.find(sequence.table, at.own_key()).exists;
    const Visibility visible = state.visible(params, at.saved);
    const bool sees = sees_key(score, visible, sequence.mask, 0, key, exists);
    seen = uint(simd_vote::vote_t(simd_ballot(sees)));
    score = sees ? score : -INFINITY;
  }
  return score;
}

// One step of kTileKeys keys. !kWhole: some key may not exist or not be visible to some row.
template <bool kWhole>
inline void vector_step(thread VectorAttention& attention, thread const VectorQuery& query,
                        thread Sequence& sequence, thread const StepKeys& step,
                        thread const DecodeState& state, constant DecodeParams& params, VectorLane at) {
  uint seen = ~0u;
  state.take_key_start(sequence);
  const float score = vector_score<kWhole>(query, sequence, step, state, params, at, seen);
  const float weight = attention.weigh(score);
  state.take_value_start(sequence);
  const uint seen_here = seen >> at.first();  // bit row * kLaneKeys + i: this lane's key number i
#pragma clang loop unroll(full)
  for (int first = 0; first < kLaneKeys; first += kValuesAtOnce) {
    LaneValue values[kValuesAtOnce];
#pragma clang loop unroll(full)
    for (int n = 0; n < kValuesAtOnce; n++) {
      const device Element* row = row_of(sequence.value, params.value, sequence, step, first + n, at);
      // A value that no row sees must not be multiplied, not even by 0.
      const uint by_rows = (1u | 1u << ((kPackedRows - 1) * kLaneKeys)) << (first + n);
      if (kWhole || (seen_here & by_rows) != 0) {
        values[n].read(row, at);
      } else {
        values[n].clear();
      }
    }
#pragma clang loop unroll(full)
    for (int n = 0; n < kValuesAtOnce; n++) {
      float weights[kPackedRows];
#pragma clang loop unroll(full)
      for (int r = 0; r < kPackedRows; r++) {
        weights[r] = simd_shuffle(weight, ushort(at.first() + r * kLaneKeys + first + n));
      }
      attention.add_value(values[n], weights);
    }
  }
}

}  // namespace fattn
