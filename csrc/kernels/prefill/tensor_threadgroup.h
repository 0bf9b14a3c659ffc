// The rows of a simdgroup of prefill_tensor whose scores pass through threadgroup memory, addressed by their
// coordinates. Two lanes share a row; each has half of its scores.
#pragma once

namespace fattn {

FATTN_CONSTEXPR int kRowLanes = kSimdWidth / kTensorRows;
FATTN_CONSTEXPR int kLaneScores = kTileKeys / kRowLanes;
static_assert(kRowLanes == 2, "the sums of two lanes are added");

struct TensorRows {
  threadgroup float* scores_of_rows;  // of this simdgroup, as are the factors
  threadgroup float* factors;
  RowSoftmax state;  // of row `row`
  ushort row;
  ushort half_row;

  template <class Scores, class Reduced, class Output>
  void begin(thread Scores&, thread Reduced&, thread Output&, thread const PrefillTile& tile) thread {
    row = tile.at.lane / kRowLanes;
    half_row = tile.at.lane % kRowLanes;
    state = first_state(tile, row);
  }

  // Turns scores into weights, in threadgroup memory, and scales the output to the new maxima.
  template <class Scores, class Reduced, class Output>
  void to_weights(thread Scores& scores, thread Reduced&, thread Output& output) thread {
    simdgroup_barrier(mem_flags::mem_threadgroup);  // the previous weights and factors have been read
    FATTN_EACH_ELEMENT(i, scores) {
      const auto at = scores.get_multidimensional_index(i);
      scores_of_rows[at[1] * kScorePitch + at[0]] = scores[i];
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    threadgroup float* own = scores_of_rows + row * kScorePitch + half_row * kLaneScores;
    float largest = own[0];
    FATTN_UNROLL
    for (int k = 1; k < kLaneScores; k++) {
      largest = fmax(largest, own[k]);
    }
    const float factor = state.grow(fmax(largest, simd_shuffle_xor(largest, ushort(1))));
    float sum = 0.0f;
    FATTN_UNROLL
    for (int k = 0; k < kLaneScores; k++) {
      own[k] = weight_of(own[k] - state.origin());
      sum += own[k];
    }
    state.sum += sum + simd_shuffle_xor(sum, ushort(1));
    put_factor(factor);
    FATTN_EACH_ELEMENT(i, output) { output[i] *= factors[output.get_multidimensional_index(i)[1]]; }
  }

  // After the last step: one of a row's lanes stores its sum.
  template <class Scores>
  void store_sums(thread Scores&, thread const PrefillTile& tile) const thread {
    if (half_row == 0) {
      store_sum(state, row, tile);
    }
  }

  // Converts the factors to the results' scale factors.
  void finish() thread {
    simdgroup_barrier(mem_flags::mem_threadgroup);  // the factors of the last step have been read
    put_factor(result_scale(state.sum));
  }
  float factor(ushort, int row_of_element) const thread { return factors[row_of_element]; }

  SharedWeights weights() const thread {
    return SharedWeights(scores_of_rows, dextents<int, 2>(kTileKeys, kTensorRows),
                         array<int, 2>{1, kScorePitch});
  }

 private:
  // All lanes call it. Afterwards the factors and weights of all rows are visible to the simdgroup.
  void put_factor(float factor) thread {
    if (half_row == 0) {
      factors[row] = factor;
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
  }
};

}  // namespace fattn
