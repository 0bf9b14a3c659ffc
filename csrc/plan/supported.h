// Limits of the kernels. The checks, `explain`, the tests and the README's table read them.
#pragma once

#include "problem.h"

namespace fattn {

// The first Apple GPU family with simdgroup matrices: A14 and M1.
inline constexpr int kMinFamily = 7;
inline constexpr int64_t kHeadDimMultiple = 8;
inline constexpr int64_t kMaxHeadDim = 576;
// Linear attention.
inline constexpr int64_t kMaxDeltaHeadDim = 256;
inline constexpr int64_t kMaxDeltaLength = int64_t(1) << 20;  // tokens of a sequence, which run in order
inline constexpr int64_t kMaxTaps = 8;
// Columns that a lane of rotary takes.
inline constexpr int64_t kRotaryMultiple = 4;
inline constexpr int64_t kMaxBackwardHeadDim = 256;
// With a larger cap, the quotient of a score and the cap could be subnormal in float32.
inline constexpr double kMaxSoftcap = 1e30;
// Rows or keys of a block of block_mask, a power of two.
inline constexpr int64_t kMinMaskBlock = 32;
inline constexpr int64_t kMaxMaskBlock = 256;
inline constexpr int64_t kMaxTreeRows = 64;  // query rows under a tree mask, which has a bit for each
// Lengths and block counts are passed as 32-bit integers; offsets are 64-bit.
inline constexpr int64_t kMaxLength = int64_t(1) << 30;
inline constexpr int64_t kMaxBlocks = int64_t(1) << 31;  // exclusive
// Elements of softmax and softcap, whose rows and threadgroups have 32-bit indices.
inline constexpr int64_t kMaxLogits = int64_t(1) << 33;
inline constexpr int64_t kMaxLogitsRows = (int64_t(1) << 32) - 1;
// Threadgroups of the mask map pass, which have 32-bit indices.
inline constexpr int64_t kMaxMapGroups = (int64_t(1) << 31) - 1;
// Rows of a result, which have 32-bit indices in the kernels.
inline constexpr int64_t kMaxRows = (int64_t(1) << 32) - 1;

}  // namespace fattn
