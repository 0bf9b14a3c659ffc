// Attention of a few query rows over a stream of keys, with scores, weights and output in registers. Online
// softmax (Milakov & Gimelshein 2018; FlashAttention: Dao et al. 2022): a step with scores s and values v
// updates a row's maximum m, sum l and output o by
//
//   m' = max(m, max(s)),  w = exp(s - m'),  l' = exp(m - m') l + sum(w),  o' = exp(m - m') o + w v
//
// and the result is o / l.
#pragma once

#include "score_units.h"
#include "tile.h"

namespace fattn {

// float32 scores are summed chunk by chunk: the rounding errors of one chain of D additions would dominate
// the error of the result.
FATTN_CONSTEXPR bool kBlockedSums = sizeof(Element) == 4;

// A blocked sum starts at 0 and is added to the score when it is complete; otherwise the sum continues from
// the score.
inline void begin_sum(thread simdgroup_float8x8& sum, thread const simdgroup_float8x8& score) {
  if (kBlockedSums) {
    set_elements(sum, 0.0f, 0.0f);
  } else {
    sum = score;
  }
}
inline void end_sum(thread simdgroup_float8x8& sum, thread simdgroup_float8x8& score) {
  if (kBlockedSums) {
    score.thread_elements()[0] += sum.thread_elements()[0];
    score.thread_elements()[1] += sum.thread_elements()[1];
  } else {
    score = sum;
  }
}

// product * scale, but NaN for an infinite scale: the elements may be infinities of both signs.
inline float scaled_product(float product, float scale) { return fma(product, scale, 0.0f * scale); }

// The key fragments of a step to multiply.
struct StepFragments {
  uint some;  // with a mask map, bit k: fragment k; otherwise the number of leading fragments

  bool any() const thread { return some != 0; }
  bool has(int k) const thread { return has_some(k, 1); }
  // Exclusive upper bound of the fragments' indices.
  int end() const thread { return fc_mask_map ? kKeyFragments : min(int(some), kKeyFragments); }
  // Whether some fragment of [k, k + count) is not hidden. Without a map, hidden fragments come last.
  bool has_some(int k, int count) const thread {
    return fc_mask_map ? ((some >> k) & ((1u << count) - 1)) != 0 : k < int(some);
  }
};

inline StepFragments all_fragments() {
  StepFragments fragments;
  fragments.some = fc_mask_map ? (1u << kKeyFragments) - 1 : uint(kKeyFragments);
  return fragments;
}

// The visible keys of a step that concern this lane.
struct SeenKeys {
  uint scored;  // by a row of this lane: bit 2k + e is key 2 * pair + e of fragment k
  uint all;     // by any row: bit 8 * pair + 2k + e likewise
  uint read;    // by any row: bit 2k is key `row` of fragment k, whose value this lane reads

  // Whether any row sees the value. If not, do not read it: it may be NaN, and 0 * NaN is NaN.
  bool value(int k) const thread { return (read >> (2 * k)) & 1; }
  // Whether some row sees a key of fragments [k, k + count).
  bool some(int k, int count) const thread {
    return (all & ((1u << (2 * count)) - 1) * 0x01010101u << (2 * k)) != 0;
  }
  // A visible key, relative to the step. Requires that one exists.
  int some_key() const thread {
    const int bit = ctz(all);
    return bit % 8 / 2 * 8 + bit / 8 * 2 + bit % 2;
  }
};

inline SeenKeys all_seen() {
  SeenKeys seen;
  seen.scored = ~0u;
  seen.all = ~0u;
  seen.read = ~0u;
  return seen;
}

// The state of one simdgroup: kRows x 8 query rows, kKeys x 8 keys per step, kColumns x 8 output columns.
// Below, `Query` has a member `rows(r, f)`: fragment f of D / 8 of row fragment r.
template <int kRows, int kKeys, int kColumns>
struct AttentionState {
  simdgroup_float8x8 score[kRows][kKeys];  // after to_weights(): the weights
  simdgroup_float8x8 out[kRows][kColumns];
  float row_max[kRows];
  float row_sum[kRows];  // until finish(): of this lane's columns only

  // Explicit, because from MSL 4.1 on an implicit constructor belongs to the generic address space, and the
  // fragments' constructors may be `thread` only.
  AttentionState() thread {}

  void clear() thread {
    FATTN_UNROLL
    for (int r = 0; r < kRows; r++) {
      row_max[r] = -INFINITY;
      row_sum[r] = 0.0f;
      FATTN_UNROLL
      for (int f = 0; f < kColumns; f++) {
        set_elements(out[r][f], 0.0f, 0.0f);
      }
    }
  }

  // Adds a learned logit, whose value is 0, to row r. Call it before the first step, with `counts` in one of
  // the simdgroups and lanes that share the row. A logit of +inf leaves no finite weight, like a score of
  // +inf.
  void add_sink(int r, float logit, bool counts) thread {
    row_max[r] = logit;
    row_sum[r] = counts ? (logit < INFINITY ? 1.0f : NAN) : 0.0f;
  }

  void clear_scores() thread {
    FATTN_UNROLL
    for (int r = 0; r < kRows; r++) {
      FATTN_UNROLL
      for (int k = 0; k < kKeys; k++) {
        set_elements(score[r][k], 0.0f, 0.0f);
      }
    }
  }

  // Adds the products with chunk c of G key fragments from `first_key_fragment` on. `first` and `second` are
  // this lane's chunks of keys 2 * pair and 2 * pair + 1. The fragments are interleaved, so that consecutive
  // products do not add to the same sum.
  template <int G, typename Query>
  void multiply_key_chunk(thread const Query& query, int c, int first_key_fragment,
                          thread const Operand (&first)[G][kKeyChunk],
                          thread const Operand (&second)[G][kKeyChunk]) thread {
    simdgroup_float8x8 sums[kRows][G];
    FATTN_UNROLL
    for (int r = 0; r < kRows; r++) {
      FATTN_UNROLL
      for (int g = 0; g < G; g++) {
        begin_sum(sums[r][g], score[r][first_key_fragment + g]);
      }
    }
    FATTN_UNROLL
    for (int i = 0; i < kKeyChunk; i++) {
      FATTN_UNROLL
      for (int g = 0; g < G; g++) {
        OperandFragment key;
        set_elements(key, first[g][i], second[g][i]);
        FATTN_UNROLL
        for (int r = 0; r < kRows; r++) {
          simdgroup_multiply_accumulate(sums[r][g], query.rows(r, c * kKeyChunk + i), key, sums[r][g]);
        }
      }
    }
    FATTN_UNROLL
    for (int r = 0; r < kRows; r++) {
      FATTN_UNROLL
      for (int g = 0; g < G; g++) {
        end_sum(sums[r][g], score[r][first_key_fragment + g]);
      }
    }
  }

  // The same for key fragment k alone: N of its D / 8 fragments, from `first_fragment` on.
  template <int N, typename Query>
  void multiply_key_fragment(thread const Query& query, int first_fragment, int k,
                             thread const Operand (&first)[N], thread const Operand (&second)[N]) thread {
    FATTN_UNROLL
    for (int r = 0; r < kRows; r++) {
      simdgroup_float8x8 sum;
      begin_sum(sum, score[r][k]);
      FATTN_UNROLL
      for (int i = 0; i < N; i++) {
        OperandFragment key;
        set_elements(key, first[i], second[i]);
        simdgroup_multiply_accumulate(sum, query.rows(r, first_fragment + i), key, sum);
      }
      end_sum(sum, score[r][k]);
    }
  }

  // Multiplies the products with key fragment k by the scales of keys 2 * pair and 2 * pair + 1.
  void scale_products(int k, float first, float second) thread {
    FATTN_UNROLL
    for (int r = 0; r < kRows; r++) {
      set_elements(score[r][k], scaled_product(score[r][k].thread_elements()[0], first),
                   scaled_product(score[r][k].thread_elements()[1], second));
    }
  }

  // After to_weights(): the same for the weights. row_sum keeps the unscaled weights.
  void scale_weights(int k, float first, float second, SeenKeys seen) thread {
    const float first_scale = (seen.scored >> (2 * k)) & 1 ? first : 0.0f;
    const float second_scale = (seen.scored >> (2 * k + 1)) & 1 ? second : 0.0f;
    FATTN_UNROLL
    for (int r = 0; r < kRows; r++) {
      set_elements(score[r][k], score[r][k].thread_elements()[0] * first_scale,
                   score[r][k].thread_elements()[1] * second_scale);
    }
  }

  // Call it before to_weights(). Only attn_mask or a tree mask hides a key from all rows that see it by
  // position.
  SeenKeys seen_keys(LanePosition at) const thread {
    if (!fc_hides_any) {
      return all_seen();
    }
    SeenKeys seen;
    seen.scored = 0;
    FATTN_UNROLL
    for (int k = 0; k < kKeys; k++) {
      FATTN_UNROLL
      for (int e = 0; e < 2; e++) {
        bool some = false;
        FATTN_UNROLL
        for (int r = 0; r < kRows; r++) {
          some |= score[r][k].thread_elements()[e] != -INFINITY;
        }
        seen.scored |= uint(some) << (2 * k + e);
      }
    }
    static_assert(kKeys <= 4, "all has a byte for each pair of columns");
    seen.all = simd_or(seen.scored << (8 * at.pair));
    seen.read = seen.all >> (at.row / 2 * 8 + at.row % 2);
    return seen;
  }

  // Turns the scores of a step into weights and rescales the state to the new maximum, as above.
  void to_weights() thread {
    FATTN_UNROLL
    for (int r = 0; r < kRows; r++) {
      float step_max = -INFINITY;
      FATTN_UNROLL
      for (int k = 0; k < kKeys; k++) {
        step_max = fmax(step_max, fmax(score[r][k].thread_elements()[0], score[r][k].thread_elements()[1]));
      }
      const float new_max = fmax(row_max[r], row_max_of(step_max));
      // Until a row sees a key its maximum is -inf, and (-inf) - (-inf) is NaN: subtract 0 instead.
      const float origin = new_max == -INFINITY ? 0.0f : new_max;
      // Exactly 1 if the maximum stays: fast::exp2(0) may be inexact, and errors would accumulate over the
      // steps. A select, because a branch takes 10 half registers more, and decode with a mask then runs 640
      // threads instead of 704 (float16, D = 64; Mesa's count for M1 and M2).
      const float shrunk = weight_of(row_max[r] - origin);
      const float shrink = row_max[r] == new_max ? 1.0f : shrunk;
      float sum = row_sum[r] * shrink;
      FATTN_UNROLL
      for (int k = 0; k < kKeys; k++) {
        const float first = weight_of(score[r][k].thread_elements()[0] - origin);
        const float second = weight_of(score[r][k].thread_elements()[1] - origin);
        set_elements(score[r][k], first, second);
        sum += first + second;
      }
      row_max[r] = new_max;
      row_sum[r] = sum;
      FATTN_UNROLL
      for (int f = 0; f < kColumns; f++) {
        out[r][f].thread_elements()[0] *= shrink;
        out[r][f].thread_elements()[1] *= shrink;
      }
    }
  }

  // Adds the weighted values of key fragment k. `run` is this lane's part of key `row`, for the fragments of
  // Dv / 8 from `first_fragment` on.
  template <int N>
  void multiply_values(int k, thread const Operand (&run)[N], int first_fragment = 0) thread {
    FATTN_UNROLL
    for (int i = 0; i < N / 2; i++) {
      const int f = first_fragment + i;
      OperandFragment value;
      set_elements(value, run[2 * i], run[2 * i + 1]);
      FATTN_UNROLL
      for (int r = 0; r < kRows; r++) {
        simdgroup_multiply_accumulate(out[r][f], score[r][k], value, out[r][f]);
      }
    }
  }

  // After the last step: sums row_sum over the lanes of each row.
  void finish() thread {
    FATTN_UNROLL
    for (int r = 0; r < kRows; r++) {
      row_sum[r] = row_sum_of(row_sum[r]);
    }
  }
};

// The state of a simdgroup that holds whole rows.
typedef AttentionState<kRowFragments, kKeyFragments, kValueDim / 8> OnlineAttention;

}  // namespace fattn
