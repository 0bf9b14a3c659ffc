// The score options, which all attention operators take. Fields, schemas, the reading of arguments and
// bindings are generated from this list; score_options.cpp has the meaning of an option and refuses its bad
// values.
#pragma once

#include <cstdint>
#include <optional>

#include "../kernels/common/params.h"

namespace fattn {

// In the order of the schema. NUMBER(type, name, default). PER_HEAD(slot, name, by_sequence): a tensor
// [query heads], by_sequence also [batch, query heads].
#define FATTN_SCORE_OPTIONS(NUMBER, PER_HEAD)                                            \
  NUMBER(int64_t, window_left, -1)          /* keys below the row's own; -1: no limit */ \
  NUMBER(int64_t, window_right, -1)         /* keys above it; -1: no limit */            \
  NUMBER(int64_t, sink_tokens, 0)           /* first keys, which every window has */     \
  PER_HEAD(Sinks, sinks, false)             /* logits of the softmax */                  \
  PER_HEAD(AlibiSlopes, alibi_slopes, true) /* added for each key of distance */         \
  NUMBER(double, softcap, 0.0)              /* 0: none */

// A number per query head, or per sequence and query head. Strides are in elements.
struct PerHead {
  bool given = false;
  FloatKind kind = kKindFloat32;
  int64_t batch_stride = 0;  // 0: the same for all sequences
  int64_t stride = 0;
};

struct ScoreOptions {
#define FATTN_NUMBER(type, name, value) type name = value;
#define FATTN_PER_HEAD(slot, name, by_sequence) PerHead name;
  FATTN_SCORE_OPTIONS(FATTN_NUMBER, FATTN_PER_HEAD)
#undef FATTN_NUMBER
#undef FATTN_PER_HEAD
  // decode: int64 [q_len] or [batch, q_len], strides in elements.
  bool tree_mask = false;
  int64_t tree_mask_batch_stride = 0;
  int64_t tree_mask_row_stride = 0;
};

// The options as the kernels read them: see PrefillParams and DecodeParams.
struct ScoreParams {
#define FATTN_FIELD(type, name) type name;
  FATTN_SCORE_STRIDES(FATTN_FIELD)
  FATTN_SCORE_PARAMS(FATTN_FIELD)
#undef FATTN_FIELD
};

struct Features;
struct Problem;
struct Refusal;

std::optional<Refusal> check_score_options(const Problem& problem);
// Whether a score depends on the row's position.
bool reads_positions(const ScoreOptions& options);
// Whether the softmax differs from that of torch's attention over the same keys.
bool changes_scores(const ScoreOptions& options);
void set_score_features(Features& features, const Problem& problem);
ScoreParams score_params(const Problem& problem);

}  // namespace fattn
