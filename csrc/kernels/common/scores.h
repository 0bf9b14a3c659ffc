// Turns products into scores: scale, softcap, ALiBi, attn_mask, visibility. All arithmetic is in float32.
#pragma once

#include "mask.h"
#include "softcap.h"
#include "softmax.h"

// A bit for each draft token.
#ifndef FATTN_DRAFTS
#define FATTN_DRAFTS ulong
#endif

namespace fattn {

// The keys that a row sees by position, relative to a key of a step. A lane computes this once per step and
// compares it with constants.
struct NearKeys {
  int limit;
  int window_begin;
  int sink_end;
  int first_draft;
  FATTN_DRAFTS drafts;

  bool has(int key) const thread {
    bool seen = key < limit;
    if (fc_window) {
      seen = (seen && key >= window_begin) || key < sink_end;
    }
    if (fc_tree) {
      seen = seen && (key < first_draft || ((drafts >> (key - first_draft)) & 1));
    }
    return seen;
  }
};

// Visibility for this lane's rows: the window that ends at the row's limit (its causal position, the window's
// right end, or the number of keys), the sink tokens before the window, and with a tree mask the draft tokens
// of the row's branch. attn_mask may hide any of these keys.
struct Visibility {
  int limit[kRowFragments];  // row r sees keys j < limit[r]; 0 if the row does not exist
  int window_begin[kRowFragments];
  int sink_end[kRowFragments];
  int first_draft;
  FATTN_DRAFTS drafts[kRowFragments];  // bit t: row r sees draft token t
  long mask_row[kRowFragments];        // its first element; 0 if the row does not exist
  long mask_key_stride;
  int mask_keys;

  // The keys that row r sees by its position, counted from `key`.
  NearKeys near(int r, int key) const thread {
    NearKeys keys;
    keys.limit = limit[r] - key;
    if (fc_window) {
      keys.window_begin = window_begin[r] - key;
      keys.sink_end = sink_end[r] - key;
    }
    if (fc_tree) {
      keys.first_draft = first_draft - key;
      keys.drafts = drafts[r];
    }
    return keys;
  }
};

// The parameters of modified_score().
struct ScoreModifiers {
  float scale;  // to score units; with softcap, to the argument of tanh
  float softcap;
  float slope[kRowFragments];
  // Between -2^30 (rows before the first key are negative) and 2^31 - 1, since q_offset <= 2^30 and
  // row < 2^30. key - position fits in an int, position + 1 may not.
  int position[kRowFragments];
};

// Sets the members that are the same for all rows.
template <typename Params>  // PrefillParams, DecodeParams
inline void set_uniform(thread ScoreModifiers& modifiers, constant Params& params) {
  modifiers.scale = params.score_scale;
  modifiers.softcap = params.softcap;
}

// score = cap * tanh(scale * product / cap) + slope * (key - position); softcap and ALiBi are optional.
inline float capped_score(float product, thread const ScoreModifiers& modifiers) {
  float s = product * modifiers.scale;
  if (fc_softcap) {
    s = softcapped(s, modifiers.softcap);
  }
  return s;
}
inline float biased_score(float capped, thread const ScoreModifiers& modifiers, int r, int key) {
  float s = capped;
  if (fc_alibi) {
    s += modifiers.slope[r] * float(key - modifiers.position[r]);
  }
  return s;
}
inline float modified_score(float product, thread const ScoreModifiers& modifiers, int r, int key) {
  return biased_score(capped_score(product, modifiers), modifiers, r, key);
}

// Whether row r sees the key, which may not exist. Adds attn_mask to the score.
inline bool sees_key(thread float& score, thread const Visibility& visible, const device uchar* mask, int r,
                     int key, bool exists) {
  const NearKeys near = visible.near(r, key);
  bool seen = near.has(0) && exists;
  if (seen && fc_has_mask) {
    const float added = mask_value(mask, visible.mask_row[r] + uint(key) * visible.mask_key_stride);
    seen = !hides_key(added);
    score = fc_additive_mask ? score + added : score;
  }
  return seen;
}

// Turns the products of a step into scores.
template <typename Attention>
inline void modify_scores(thread Attention& attention, thread const ScoreModifiers& modifiers, int first_key,
                          LanePosition at) {
  FATTN_UNROLL
  for (int r = 0; r < kRowFragments; r++) {
    FATTN_UNROLL
    for (int k = 0; k < kKeyFragments; k++) {
      FATTN_UNROLL
      for (int e = 0; e < 2; e++) {
        const int key = first_key + k * 8 + at.pair * 2 + e;
        const float product = attention.score[r][k].thread_elements()[e];
        attention.score[r][k].thread_elements()[e] = modified_score(product, modifiers, r, key);
      }
    }
  }
}

// Where this lane reads attn_mask in a step, relative to its first key. Keys past the end of the mask read
// its last one: conditional loads would serialise.
struct MaskKeys {
  int first;
  int left;  // from the first to the last
  long stride;

  void set(thread const Visibility& visible, int key) thread {
    const int last = visible.mask_keys - (fc_mask_pairs ? 2 : 1);
    first = min(key, last);
    left = max(last - key, 0);
    stride = visible.mask_key_stride;
  }
  // The terms of two neighbouring keys of a row whose first element is `row`.
  float2 terms(const device uchar* mask, long row, int next) const thread {
    if (fc_mask_pairs) {
      return mask_pair(mask, uint(ulong(row) / 2) + uint(first + min(next, left)) / 2);
    }
    return float2(mask_value(mask, row + (first + min(next, left)) * stride),
                  mask_value(mask, row + (first + min(next + 1, left)) * stride));
  }
};

// Adds attn_mask to the scores and sets the scores of hidden keys to -inf. `first_key`: of the step. Bit
// 2k + e of `present`: the key of element e of this lane's fragment k exists.
template <typename Attention>
inline void hide_scores(thread Attention& attention, thread const Visibility& visible,
                        const device uchar* mask, int first_key, uint present, LanePosition at) {
  float2 terms[kRowFragments][kKeyFragments];
  MaskKeys keys;
  keys.set(visible, first_key + at.pair * 2);
  FATTN_UNROLL
  for (int r = 0; r < kRowFragments; r++) {
    FATTN_UNROLL
    for (int k = 0; k < kKeyFragments; k++) {
      terms[r][k] = fc_has_mask ? keys.terms(mask, visible.mask_row[r], k * 8) : float2(0.0f);
    }
  }
  FATTN_UNROLL
  for (int r = 0; r < kRowFragments; r++) {
    const NearKeys near = visible.near(r, first_key + at.pair * 2);
    FATTN_UNROLL
    for (int k = 0; k < kKeyFragments; k++) {
      FATTN_UNROLL
      for (int e = 0; e < 2; e++) {
        const bool exists = (present >> (2 * k + e)) & 1;
        const float term = terms[r][k][e];
        const float score = attention.score[r][k].thread_elements()[e];
        const bool seen = near.has(k * 8 + e) && exists && !hides_key(term);
        attention.score[r][k].thread_elements()[e] =
            seen ? (fc_additive_mask ? score + term : score) : -INFINITY;
      }
    }
  }
}

}  // namespace fattn
