// Linear attention: its buffers and its structs of parameters, for host and kernels (common/params.h).
#pragma once

#include "../common/params.h"

namespace fattn {

// The slots of its own operands. causal_conv1d has its rows and weight where rms_norm has them.
enum DeltaBuffer {
  kBufferDecay = kSlotMask,
  kBufferBeta,
  kBufferALog,
  kBufferDtBias,
  kBufferState,
  kBufferHasInitial,
  kBufferStateSlots,
  kBufferSeqlens,
  kBufferChunks,
  kBufferOutGate = kSlotSlice + 1,
  kBufferConvWeight,
  kBufferConvBias,
  kBufferNormWeight,
  kBufferConvState,
  kBufferCounts,
  kBufferConvStateOut,
};

// Strides of tokens [batch, length, heads, columns]. `group`: from a key head to the next; `head`: among the
// value heads of a key head.
#define FATTN_TOKEN_STRIDES(X) X(fattn_i64, batch) X(fattn_i64, token) X(fattn_i64, group) X(fattn_i64, head)
struct TokenStrides {
  FATTN_TOKEN_STRIDES(FATTN_FIELD)
};

// The operands of the gated delta rule. `decay` and `beta` are g and beta, or a and b.
#define FATTN_DELTA_ROWS(X) \
  X(TokenStrides, query)    \
  X(TokenStrides, key)      \
  X(TokenStrides, value)    \
  X(TokenStrides, decay)    \
  X(TokenStrides, beta)     \
  X(fattn_i64, state) /* from a state to the next; each is contiguous */

#define FATTN_GATED_DELTA_PARAMS(X)                                        \
  FATTN_DELTA_ROWS(X)                                                      \
  X(fattn_i64, chunks) /* of all sequences, some unused if packed */       \
  X(fattn_i32, length) /* tokens per sequence; packed: of all sequences */ \
  X(fattn_i32, sequences)                                                  \
  X(fattn_i32, states)                                                     \
  X(fattn_i32, key_heads)                                                  \
  X(fattn_i32, group_size) /* value heads per key head */                  \
  X(fattn_f32, scale)
struct GatedDeltaParams {
  FATTN_GATED_DELTA_PARAMS(FATTN_FIELD)
};

#define FATTN_GATED_DELTA_STEP_PARAMS(X)                                      \
  FATTN_DELTA_ROWS(X)                                                         \
  X(TokenStrides, gate)                                                       \
  X(fattn_i64, conv_state) /* from a state to the next, and from a channel */ \
  X(fattn_i64, conv_channel)                                                  \
  X(fattn_i32, conv_columns)                                                  \
  X(fattn_i32, length)                                                        \
  X(fattn_i32, states)                                                        \
  X(fattn_i32, key_heads)                                                     \
  X(fattn_i32, group_size)                                                    \
  X(fattn_i32, heads) /* value heads per threadgroup */                       \
  X(fattn_f32, scale)                                                         \
  X(fattn_f32, eps)
struct GatedDeltaStepParams {
  FATTN_GATED_DELTA_STEP_PARAMS(FATTN_FIELD)
};

#define FATTN_CAUSAL_CONV1D_PARAMS(X)                                       \
  X(Strides3, x)      /* batch, channel, token */                           \
  X(fattn_i64, state) /* from a state to the next, and from a channel */    \
  X(fattn_i64, state_channel)                                               \
  X(fattn_i64, columns) /* of a state */                                    \
  X(fattn_i32, length)  /* tokens per sequence; packed: of all sequences */ \
  X(fattn_i32, sequences)                                                   \
  X(fattn_i32, states)                                                      \
  X(fattn_i32, channels)
struct CausalConv1dParams {
  FATTN_CAUSAL_CONV1D_PARAMS(FATTN_FIELD)
};

FATTN_CHECK_PARAMS(GatedDeltaParams, FATTN_GATED_DELTA_PARAMS);
FATTN_CHECK_PARAMS(GatedDeltaStepParams, FATTN_GATED_DELTA_STEP_PARAMS);
FATTN_CHECK_PARAMS(CausalConv1dParams, FATTN_CAUSAL_CONV1D_PARAMS);

}  // namespace fattn
