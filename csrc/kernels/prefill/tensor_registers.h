// The rows of a simdgroup of prefill_tensor whose scores stay in registers. Metal reduces the rows of scores,
// maps each element of scores and output to its row, and takes the weights as a left operand in place. A
// lane's elements are in at most two rows: a bit per element selects the row. The self-test verifies all of
// this.
#pragma once

namespace fattn {

struct TensorRows {
  RowSoftmax states[kMaxReducedRows];
  float factors[kMaxReducedRows];
  uint rows_of_scores;
  ulong rows_of_output;

  template <class Scores, class Reduced, class Output>
  void begin(thread Scores& scores, thread Reduced& reduced, thread Output& output,
             thread const PrefillTile& tile) thread {
    // Set each element to the index of its row; the maximum is this index.
    FATTN_EACH_ELEMENT(i, scores) { scores[i] = scores.get_multidimensional_index(i)[1]; }
    reduce_rows(scores, reduced, reduction_operation::max, -INFINITY);
    FATTN_UNROLL
    for (ushort j = 0; j < kMaxReducedRows; j++) {
      states[j] = first_state(tile, has_row(reduced, j) ? int(reduced[j]) : 0);
      factors[j] = 1.0f;
    }
    FATTN_UNROLL
    for (ushort j = 0; j < reduced.get_capacity(); j++) {
      reduced[j] = j;
    }
    rows_of_scores = 0;
    auto score = scores.begin();
    FATTN_UNROLL
    for (ushort i = 0; i < scores.get_capacity(); i++, ++score) {
      if (scores.is_valid_element(i)) {
        rows_of_scores |= uint(*reduced.map_iterator(score) == 1.0f) << i;
      }
    }
    rows_of_output = 0;
    auto element = output.begin();
    FATTN_UNROLL
    for (ushort i = 0; i < output.get_capacity(); i++, ++element) {
      if (output.is_valid_element(i)) {
        rows_of_output |= ulong(*reduced.map_iterator(element) == 1.0f) << i;
      }
    }
  }

  // Turns scores into weights, and scales the output to the new maxima.
  template <class Scores, class Reduced, class Output>
  void to_weights(thread Scores& scores, thread Reduced& reduced, thread Output& output) thread {
    reduce_rows(scores, reduced, reduction_operation::max, -INFINITY);
    FATTN_UNROLL
    for (ushort j = 0; j < kMaxReducedRows; j++) {
      if (has_row(reduced, j)) {
        factors[j] = states[j].grow(reduced[j]);
      }
    }
    const float first_origin = states[0].origin(), second_origin = states[1].origin();
    FATTN_EACH_ELEMENT(i, scores) {
      scores[i] = weight_of(scores[i] - (is_second_of_scores(i) ? second_origin : first_origin));
    }
    reduce_rows(scores, reduced, reduction_operation::sum, 0.0f);
    FATTN_UNROLL
    for (ushort j = 0; j < kMaxReducedRows; j++) {
      if (has_row(reduced, j)) {
        states[j].sum += reduced[j];
      }
    }
    FATTN_EACH_ELEMENT(i, output) { output[i] *= factor(i, 0); }
  }

  // After the last step: the lane with the first score of a row stores its sum.
  template <class Scores>
  void store_sums(thread Scores& scores, thread const PrefillTile& tile) const thread {
    FATTN_EACH_ELEMENT(i, scores) {
      const auto at = scores.get_multidimensional_index(i);
      if (at[0] == 0) {
        RowSoftmax state;
        state.largest = is_second_of_scores(i) ? states[1].largest : states[0].largest;
        state.sum = is_second_of_scores(i) ? states[1].sum : states[0].sum;
        store_sum(state, at[1], tile);
      }
    }
  }

  // Converts the factors to the results' scale factors.
  void finish() thread {
    FATTN_UNROLL
    for (ushort j = 0; j < kMaxReducedRows; j++) {
      factors[j] = result_scale(states[j].sum);
    }
  }
  // A select: dynamic indexing would spill.
  float factor(ushort element, int) const thread {
    return (rows_of_output >> element) & 1 ? factors[1] : factors[0];
  }

 private:
  bool is_second_of_scores(ushort element) const thread { return (rows_of_scores >> element) & 1; }
  template <class Reduced>
  static bool has_row(thread Reduced& reduced, ushort j) {
    return j < reduced.get_capacity() && reduced.is_valid_element(j);
  }
};

}  // namespace fattn
