// A row of a prefill on tensor operations: its online softmax (softmax.h), and its sum in the result.
#pragma once

#include "tensor_staging.h"

namespace fattn {

struct RowSoftmax {
  float largest;  // score
  float sum;      // of the weights

  void clear() thread {
    largest = -INFINITY;
    sum = 0.0f;
  }

  // Adds a learned logit, as AttentionState::add_sink() does.
  void add_sink(float logit) thread {
    largest = logit;
    sum = logit < INFINITY ? 1.0f : NAN;
  }

  // Raises the maximum to the largest score of a step. Returns the factor of the previous sums: exactly 1 if
  // the maximum does not change, since fast::exp2(0) may be inexact.
  float grow(float of_step) thread {
    const float before = largest;
    largest = fmax(before, of_step);
    const float factor = largest == before ? 1.0f : weight_of(before - origin());
    sum *= factor;
    return factor;
  }

  // The number to subtract from scores: 0 until the row sees a key, because (-inf) - (-inf) is NaN.
  float origin() const thread { return largest == -INFINITY ? 0.0f : largest; }
};

inline RowSoftmax first_state(thread const PrefillTile& tile, int row) {
  RowSoftmax state;
  state.clear();
  const QueryRow at = tile.own_row(row);
  if (fc_sinks && tile.part == 0 && at.exists) {
    state.add_sink(sink_score(tile.sink_of(at)));
  }
  return state;
}

// The learned logit of a row, for row_sum_with_sink().
struct RowSink {
  float logit;

  float sink(int) const thread { return logit; }
};

inline void store_sum(RowSoftmax state, int row, thread const PrefillTile& tile) {
  const TileState saved = saved_of(tile, row);
  if (saved.out(0) >= 0) {
    RowSink sink;
    sink.logit = fc_sinks ? tile.sink_of(tile.own_row(row)) : 0.0f;
    store_sum(tile.operands, saved.lse(0), row_sum_with_sink(state.largest, state.sum, sink, 0));
  }
}

}  // namespace fattn
