// Merges the chunks of a short cache, which one threadgroup processes in kChunkRounds rounds of kChunks, each
// chunk with kSimdgroups simdgroups. The result is bit-identical to a partial result per chunk and
// merge.metal.
#pragma once

#include "decode_state.h"
#include "../common/part_sum.h"

namespace fattn {

FATTN_CONSTEXPR int kAllChunks = kChunks * kChunkRounds;
// merge has one simdgroup, whose first sum covers all chunks, or one per chunk, and its second sum covers
// them.
static_assert(kAllChunks <= merge_simdgroups(kAllChunks) || kAllChunks <= 4, "as above");

FATTN_CONSTEXPR int kChunkRows = kAllChunks * kPackedRows;
FATTN_CONSTEXPR int kChunkSumFloats = chunk_sum_floats(kAllChunks, kPackedRows);
// Chunks of all rounds but the last, whose values are kept until then.
FATTN_CONSTEXPR int kKeptChunks = kAllChunks - kChunks;
FATTN_CONSTEXPR int kKeptFloats = waiting_floats(kChunks, kChunkRounds, kPackedRows, kValueDim);

// The weights of the states of one row in N simdgroups.
template <int N>
struct StateWeights {
  float weights[N];
  float largest;
  float sum;

  // Maximum and sum of each state are `stride` floats apart.
  void set(const threadgroup float* row_max, const threadgroup float* row_sum, int stride) thread {
    largest = -INFINITY;
    FATTN_UNROLL
    for (int g = 0; g < N; g++) {
      largest = fmax(largest, row_max[g * stride]);
    }
    const float origin = largest == -INFINITY ? 0.0f : largest;
    sum = 0.0f;
    FATTN_UNROLL
    for (int g = 0; g < N; g++) {
      weights[g] = weight_of(row_max[g * stride] - origin);
      sum += weights[g] * row_sum[g * stride];
    }
  }
};

// kGroups simdgroups of a chunk have the same row and different keys. `States` has kRoundColumns columns of
// every state: value(state, i) belongs to column column(i, first) of the result.
template <int kGroups>
struct ChunkSum {
  threadgroup float*
      row_max;  // [chunk of the round][group][row]; to_weights() replaces it by the state's weight
  threadgroup float* row_sum;
  // [3][chunk][row]: the chunk's RowSum; after the last round its weights in both sums, and 0 if its keys are
  // hidden from the row.
  threadgroup float* weights;
  threadgroup float* rows;  // [3][row]: RowSum
  threadgroup float* kept;  // [chunk][row][column]: values of kKeptChunks
  bool in_first;            // whether merge's first sum covers all chunks

  // `sums`: a float per state, kChunkSumFloats and kKeptFloats.
  void set(threadgroup float* maxima, threadgroup float* sums, int states, int max_chunks) thread {
    row_max = maxima;
    row_sum = sums;
    weights = sums + states;
    rows = weights + 3 * kChunkRows;
    kept = weights + kChunkSumFloats;
    in_first = merge_simdgroups(max_chunks) == 1;
  }

  // Sets the weights of a round's states, and after the last round the weights of all chunks. A simdgroup
  // takes a row, and a lane a chunk.
  void to_weights(const threadgroup SavedWork* saved, int round, ushort simdgroup_index, ushort lane) const
      thread {
    static_assert(kChunks == 1 || kPackedRows <= kChunks * kSimdgroups, "a simdgroup has one row");
    const int row = simdgroup_index;
    if (row >= kPackedRows) {
      return;
    }
    if (lane < kChunks) {
      const int state = state_of(lane, 0, row);
      StateWeights<kGroups> states;
      states.set(row_max + state, row_sum + state, kPackedRows);
      FATTN_UNROLL
      for (int g = 0; g < kGroups; g++) {
        row_max[state + g * kPackedRows] = states.weights[g];
      }
      SavedSinks sinks;
      sinks.saved = saved;
      sinks.own_row = row;
      put_triple(weights, kChunkRows, (round * kChunks + lane) * kPackedRows + row,
                 row_sum_with_sink(states.largest, states.sum, sinks, 0));
    }
    if (round == kChunkRounds - 1) {
      simdgroup_barrier(mem_flags::mem_threadgroup);  // the sums of all chunks are stored
      weigh_chunks(row, lane);
    }
  }

  // Keeps the values of a round's chunks before the next round overwrites the states.
  template <typename States>
  void keep(thread const States& states, int round, ushort thread_index) const thread {
    for (int i = thread_index; i < kPackedRows * kValueDim; i += kThreads) {
      FATTN_UNROLL
      for (int c = 0; c < kChunks; c++) {
        kept[(round * kChunks + c) * kPackedRows * kValueDim + i] =
            value_of(states, c, i / kValueDim, i % kValueDim);
      }
    }
  }

  // Stores the columns of a round, and with the first of them the sums of the rows.
  template <typename States>
  void store(thread const States& states, thread ResultRows& results, int first, ushort thread_index) const
      thread {
    for (int i = thread_index; i < kPackedRows * States::kRoundColumns; i += kThreads) {
      const int row = i / States::kRoundColumns;
      const int of_round = i % States::kRoundColumns;
      const int column = States::column(of_round, first);
      results.own_row = row;
      if (column >= kValueDim || !results.exists(0)) {
        continue;
      }
      float of_sums = 0.0f;
      float sum = 0.0f;
      FATTN_UNROLL
      for (int c = 0; c < kAllChunks; c++) {
        const float values = c < kKeptChunks ? kept[(c * kPackedRows + row) * kValueDim + column]
                                             : value_of(states, c - kKeptChunks, row, of_round);
        const threadgroup float* weight = weights + (c * kPackedRows + row);
        sum += weighted_values(weight[2 * kChunkRows] != 0.0f, weight[0], values);
        if (!in_first || c == kAllChunks - 1) {
          of_sums += weight[kChunkRows] * sum;
          sum = 0.0f;
        }
      }
      store_result(results.operands, results.place(0) + column,
                   of_sums * result_scale(rows[2 * kPackedRows + row]));
    }
    if (first == 0 && thread_index < kPackedRows) {
      results.own_row = thread_index;
      if (results.exists(0)) {
        store_sum(results.operands, results.sum_place(0), triple(rows, kPackedRows, thread_index));
      }
    }
  }

 private:
  static int state_of(int chunk, int group, int row) { return (chunk * kGroups + group) * kPackedRows + row; }

  // The value of a chunk of this round, relative to its own maximum.
  template <typename States>
  float value_of(thread const States& states, int chunk, int row, int of_round) const thread {
    float value = 0.0f;
    FATTN_UNROLL
    for (int g = 0; g < kGroups; g++) {
      const int state = state_of(chunk, g, row);
      value += row_max[state] * states.value(state, of_round);
    }
    return value;
  }

  // The weights of all chunks of a row, from their sums.
  void weigh_chunks(int row, ushort lane) const thread {
    RowSum own = row_sum_of_no_keys();
    if (lane < kAllChunks) {
      own = triple(weights, kChunkRows, lane * kPackedRows + row);
    }
    RowSum all = row_sum_of_no_keys();
    const LaneParts lanes = add_lanes(all, own, true, log2_per_score());
    RowSum keys = row_sum_of_no_keys();
    raise_to(keys, all);
    float second = 0.0f;
    if (in_first) {
      second = add_sum(keys, all, log2_per_score());
    } else {
      for (int c = 0; c < kAllChunks; c++) {
        RowSum sum;
        sum.score = simd_shuffle(own.score, ushort(c));
        sum.sum = simd_shuffle(own.sum, ushort(c));
        sum.logit = -INFINITY;  // it is in `keys`
        const float weight = add_sum(keys, sum, log2_per_score());
        second = c == lane ? weight : second;
      }
    }
    if (lane < kAllChunks) {
      threadgroup float* weight = weights + (lane * kPackedRows + row);
      weight[0] = in_first ? lanes.weight : 1.0f;
      weight[kChunkRows] = second;
      weight[2 * kChunkRows] = own.sum != 0.0f ? 1.0f : 0.0f;
    }
    if (lane == 0) {
      put_triple(rows, kPackedRows, row, keys);
    }
  }

  // The members of a RowSum, `stride` floats apart.
  static void put_triple(threadgroup float* triples, int stride, int place, RowSum sum) {
    triples[place] = sum.score;
    triples[place + stride] = sum.logit;
    triples[place + 2 * stride] = sum.sum;
  }
  static RowSum triple(const threadgroup float* triples, int stride, int place) {
    RowSum sum;
    sum.score = triples[place];
    sum.logit = triples[place + stride];
    sum.sum = triples[place + 2 * stride];
    return sum;
  }
};

}  // namespace fattn
