// Options that modify scores. All attention operators take them. Fields, schemas, argument reading and
// bindings are generated from this list; score_options.cpp implements the options and refuses bad values.
#pragma once

#include <cstdint>
#include <optional>

#include "../kernels/common/params.h"

namespace fattn {

// In the order of the schema. NUMBER(type, name, default). TENSOR(slot, name, shapes): the dimensions of a
// tensor of floats, "b" for the batch and "h" for the query heads, or two such shapes.
#define FATTN_SCORE_OPTIONS(NUMBER, TENSOR)                                              \
  NUMBER(int64_t, window_left, -1)          /* keys below the row's own; -1: no limit */ \
  NUMBER(int64_t, window_right, -1)         /* keys above it; -1: no limit */            \
  NUMBER(int64_t, sink_tokens, 0)           /* first keys, which every window has */     \
  TENSOR(Sinks, sinks, "h")                 /* logits of the softmax */                  \
  TENSOR(AlibiSlopes, alibi_slopes, "h bh") /* added for each key of distance */         \
  NUMBER(double, softcap, 0.0)              /* 0: none */

// A number for each sequence, query head, or both. Strides are in elements.
struct NumberTensor {
  bool given = false;
  bool of_sequences = false;  // the first dimension is the batch
  FloatKind kind = kKindFloat32;
  int64_t batch_stride = 0;  // 0: the same for all sequences
  int64_t stride = 0;        // from head to head; 0: the same for all heads
};

struct ScoreOptions {
#define FATTN_NUMBER(type, name, value) type name = value;
#define FATTN_TENSOR(slot, name, shapes) NumberTensor name;
  FATTN_SCORE_OPTIONS(FATTN_NUMBER, FATTN_TENSOR)
#undef FATTN_NUMBER
#undef FATTN_TENSOR
  // decode: int64 [q_len] or [batch, q_len], strides in elements.
  bool tree_mask = false;
  int64_t tree_mask_batch_stride = 0;
  int64_t tree_mask_row_stride = 0;
};

// The options as the kernels read them: see PrefillParams and DecodeParams.
struct ScoreParams {
  FATTN_SCORE_STRIDES(FATTN_FIELD)
  FATTN_SCORE_PARAMS(FATTN_FIELD)
};

struct Features;
struct Problem;
struct Refusal;

std::optional<Refusal> check_score_options(const Problem& problem);
// Whether scores depend on the position of their row.
bool reads_positions(const ScoreOptions& options);
// Whether the scores differ from torch's attention over the same keys.
bool changes_scores(const ScoreOptions& options);
void set_score_features(Features& features, const Problem& problem);
ScoreParams score_params(const Problem& problem);

}  // namespace fattn
