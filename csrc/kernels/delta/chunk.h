// The compile-time sizes of the gated delta rule, and what its first pass leaves to the second for each chunk
// of 8 tokens and value head: kDeltaChunkFloats floats.
#pragma once

#include "delta_params.h"

namespace fattn {

typedef FATTN_T Element;      // query, key, value and result
typedef FATTN_DECAY_T Decay;  // g or a
typedef FATTN_BETA_T Beta;    // beta or b

FATTN_CONSTEXPR int kHeadDim = FATTN_HEAD_DIM;
FATTN_CONSTEXPR int kValueDim = FATTN_VALUE_DIM;
FATTN_CONSTEXPR int kSimdgroups = FATTN_SIMDGROUPS;
FATTN_CONSTEXPR int kThreads = kSimdgroups * kSimdWidth;
FATTN_CONSTEXPR bool kChannelDecay = FATTN_CHANNEL_DECAY;  // else one per head

// With the chunk's keys K, queries Q, decays D_ij from token j to i, and A, the lower part of beta K K^T * D:
FATTN_CONSTEXPR int kSolveAt = 0;    // [8][8]: (I + A)^-1 diag(beta)
FATTN_CONSTEXPR int kScoresAt = 64;  // [8][8]: scale Q K^T * D
// [8] each, factors of the tokens. They have the norms and, unless each channel has its own, the decays:
FATTN_CONSTEXPR int kKeyAt = 128;     // of a row of K S, from the chunk's start
FATTN_CONSTEXPR int kQueryAt = 136;   // of a row of scale Q S, likewise
FATTN_CONSTEXPR int kUpdateAt = 144;  // of a row of what is added to the state, to the chunk's end
FATTN_CONSTEXPR int kDecayAt = 152;   // the decay of the whole chunk

}  // namespace fattn
