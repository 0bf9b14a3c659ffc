// The sum of the chunks of a short cache, which one threadgroup has at once, each with kSimdgroups
// simdgroups. The result has the bits that a partial result for each chunk and merge.metal would give.
#pragma once

#include "decode_state.h"
#include "state_weights.h"
#include "../common/part_sum.h"

namespace fattn {

// merge has one simdgroup, and its first sum has all chunks; or one for each chunk, and its second sum has
// them all.
static_assert(kChunks <= kShortChunks && kShortChunks <= 4, "merge has at least four simdgroups, or one");

FATTN_CONSTEXPR int kChunkRows = kChunks * kPackedRows;
FATTN_CONSTEXPR int kChunkSumFloats = chunk_sum_floats(kChunks, kPackedRows);

// kGroups simdgroups of a chunk have the same row and different keys. `States` has a round of kRoundColumns
// columns of every state: value(state, i), and which column of the result that is, column(i, first).
template <int kGroups>
struct ChunkSum {
  threadgroup float* row_max;  // [chunk][group][row]; weigh() replaces it by the weight of the state
  threadgroup float* row_sum;
  threadgroup float* weights;  // [3][chunk][row]: in both sums; 0 if the row saw no key of the chunk
  threadgroup float* rows;     // [3][row]: RowSum
  bool in_first;               // whether merge's first sum has all chunks

  // `sums`: as many as there are states, and kChunkSumFloats.
  void set(threadgroup float* maxima, threadgroup float* sums, int states, int most_chunks) thread {
    row_max = maxima;
    row_sum = sums;
    weights = sums + states;
    rows = weights + 3 * kChunkRows;
    in_first = merge_simdgroups(most_chunks) == 1;
  }

  // Sets the weights of all states and chunks. A simdgroup takes a row, and a lane a chunk.
  void weigh(const threadgroup SavedWork* saved, ushort simdgroup_index, ushort lane) const thread {
    SavedSinks sinks;
    sinks.saved = saved;
    for (int row = simdgroup_index; row < kPackedRows; row += kChunks * kSimdgroups) {
      RowSum own = row_sum_of_no_keys();
      if (lane < kChunks) {
        const int state = state_of(lane, 0, row);
        StateWeights<kGroups> states;
        states.set(row_max + state, row_sum + state, kPackedRows);
#pragma clang loop unroll(full)
        for (int g = 0; g < kGroups; g++) {
          row_max[state + g * kPackedRows] = states.weights[g];
        }
        sinks.own_row = row;
        own = row_sum_with_sink(states.largest, states.sum, sinks, 0);
      }
      RowSum all = row_sum_of_no_keys();
      const LaneParts lanes = add_lanes(all, own, true, log2_per_score());
      RowSum keys = row_sum_of_no_keys();
      raise_to(keys, all);
      float second = 0.0f;
      if (in_first) {
        second = add_sum(keys, all, log2_per_score());
      } else {
        for (int c = 0; c < kChunks; c++) {
          RowSum sum;
          sum.score = simd_shuffle(own.score, ushort(c));
          sum.sum = simd_shuffle(own.sum, ushort(c));
          sum.logit = -INFINITY;  // it is in `keys`
          const float weight = add_sum(keys, sum, log2_per_score());
          second = c == lane ? weight : second;
        }
      }
      if (lane < kChunks) {
        threadgroup float* weight = weights + (lane * kPackedRows + row);
        weight[0] = in_first ? lanes.weight : 1.0f;
        weight[kChunkRows] = second;
        weight[2 * kChunkRows] = own.sum != 0.0f ? 1.0f : 0.0f;
      }
      if (lane == 0) {
        rows[row] = keys.score;
        rows[kPackedRows + row] = keys.logit;
        rows[2 * kPackedRows + row] = keys.sum;
      }
    }
  }

  // Stores the columns of a round, and the sums of the rows with the first of them.
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
#pragma clang loop unroll(full)
      for (int c = 0; c < kChunks; c++) {
        float values = 0.0f;
#pragma clang loop unroll(full)
        for (int g = 0; g < kGroups; g++) {
          const int state = state_of(c, g, row);
          values += row_max[state] * states.value(state, of_round);
        }
        const threadgroup float* weight = weights + (c * kPackedRows + row);
        sum += weighted_values(weight[2 * kChunkRows] != 0.0f, weight[0], values);
        if (!in_first || c == kChunks - 1) {
          of_sums += weight[kChunkRows] * sum;
          sum = 0.0f;
        }
      }
      put_result(results.operands, results.place(0) + column,
                 of_sums * result_scale(rows[2 * kPackedRows + row]));
    }
    if (first == 0 && thread_index < kPackedRows) {
      results.own_row = thread_index;
      if (results.exists(0)) {
        RowSum sum;
        sum.score = rows[thread_index];
        sum.logit = rows[kPackedRows + thread_index];
        sum.sum = rows[2 * kPackedRows + thread_index];
        put_sum(results.operands, results.sum_place(0), sum);
      }
    }
  }

 private:
  static int state_of(int chunk, int group, int row) { return (chunk * kGroups + group) * kPackedRows + row; }
};

}  // namespace fattn
