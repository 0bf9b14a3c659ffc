// Turns the attention state after the last step into results: out and log-sum-exp of each row, or a partial
// result for merge.metal.
#pragma once

#include "operands.h"
#include "out_rows.h"
#include "part_sum.h"
#include "softmax.h"

namespace fattn {

inline RowSum row_sum_of_weights(float row_max, float sum) {
  RowSum row;
  row.score = row_max;
  row.logit = fc_additive_mask ? row_max : row_max * M_LN2_F;
  row.sum = sum;
  return row;
}

// Whether the row's largest logit is a sink that finite_score() clamped. The log-sum-exp of the row is then
// the sink itself, which is read again.
inline bool is_huge_sink(float row_max) { return fc_sinks && !fc_additive_mask && fabs(row_max) == FLT_MAX; }

// 1 / sum, or 0 for a row without keys. Partial results are not divided before they are merged.
inline float result_scale(float sum) { return fc_split ? 1.0f : sum == 0.0f ? 0.0f : 1.0f / sum; }

// A select: where another row sees a NaN, the weighted sum of this row may be NaN too, and 0 * NaN is NaN.
template <typename T>
inline T scaled_result(T weighted, float scale) {
  return scale == 0.0f ? T(0.0f) : weighted * scale;
}

// The sum of a row with largest logit `row_max`; `sinks.sink(r)` returns the learned logit of its head.
template <typename Sinks>
inline RowSum row_sum_with_sink(float row_max, float sum, thread const Sinks& sinks, int r) {
  RowSum row = row_sum_of_weights(row_max, sum);
  if (is_huge_sink(row_max)) {
    row.logit = sinks.sink(r);
  }
  return row;
}

// Store a result, four neighbouring results (without a remainder), or the sum of a row: final, or of a part
// of the keys.
inline void store_result(thread const Operands& operands, long place, float result) {
  if (fc_split) {
    operands.partial_out[place] = result;
  } else {
    operands.out[place] = Element(result);
    if (fc_out_remainder) {
      operands.out_remainder[place] = remainder_of<Element>(result);
    }
  }
}
inline void store_result(thread const Operands& operands, long place, float4 results) {
  if (fc_split) {
    *reinterpret_cast<device float4*>(operands.partial_out + place) = results;
  } else {
    *reinterpret_cast<device vec<Element, 4>*>(operands.out + place) = vec<Element, 4>(results);
  }
}
inline void store_sum(thread const Operands& operands, long place, RowSum sum) {
  if (fc_split) {
    operands.partial_sum[place] = sum.of_part(log2_per_score());
  } else {
    operands.lse[place] = sum.log_sum_exp();
  }
}

// The columns of a lane whose simdgroup holds whole rows, with the interface of ColumnShare (columns.h).
struct WholeRow {
  static constant constexpr int kAll = kValueDim / 4;

  static int column_of(int i, ushort pair, ushort) { return value_column(i, pair); }
};

// The epilogue: stores this simdgroup's columns of its rows. `rows` has place(r), the first output element of
// this lane's row r, or -1 if the row does not exist; sum_place(r), the place of its sum; and operands.
template <typename Columns, int kRows, int kKeys, int kColumns, typename Rows, typename Sinks>
inline void store_rows(thread const AttentionState<kRows, kKeys, kColumns>& attention,
                       thread const Rows& rows, thread const Sinks& sinks, ushort share, LanePosition at) {
  FATTN_UNROLL
  for (int r = 0; r < kRows; r++) {
    const long place = rows.place(r);
    if (place < 0) {
      continue;
    }
    const float scale = result_scale(attention.row_sum[r]);
    FATTN_UNROLL
    for (int i = 0; i < Columns::kAll; i++) {
      const int column = Columns::column_of(i, at.pair, share);
      if (column >= 0) {
        const float result = scaled_result(attention.out[r][i / 2].thread_elements()[i & 1], scale);
        store_result(rows.operands, place + column, result);
      }
    }
    if (share == 0 && at.pair == 0) {
      const RowSum sum = row_sum_with_sink(attention.row_max[r], attention.row_sum[r], sinks, r);
      store_sum(rows.operands, rows.sum_place(r), sum);
    }
  }
}

}  // namespace fattn
