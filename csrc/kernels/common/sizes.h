// Types and sizes that host and kernels share: tile arithmetic, and limits that both know.
#pragma once

#ifdef __METAL_VERSION__
#include <metal_stdlib>
typedef long fattn_i64;
typedef int fattn_i32;
typedef float fattn_f32;
#define FATTN_CONSTEXPR constant constexpr
#else
#include <cstdint>
typedef int64_t fattn_i64;
typedef int32_t fattn_i32;
typedef float fattn_f32;
#define FATTN_CONSTEXPR inline constexpr
#endif

namespace fattn {

// Tile arithmetic. A simdgroup works on 8-row fragments.
FATTN_CONSTEXPR int kFragment = 8;
FATTN_CONSTEXPR int kSimdWidth = 32;
// A cell of a mask map: the rows of a simdgroup of prefill, and the keys of a step.
FATTN_CONSTEXPR int kCellRows = 16;
FATTN_CONSTEXPR int kCellKeys = 32;
FATTN_CONSTEXPR int kCellFragments = kCellKeys / kFragment;
FATTN_CONSTEXPR int kAllCellFragments = (1 << kCellFragments) - 1;
FATTN_CONSTEXPR int kCellKindBits = 2;
// What a byte of a map is below.
FATTN_CONSTEXPR int kCellBytes = 1 << (kCellKindBits + kCellFragments);
// Cells that a threadgroup makes, neighbours along the keys: 256 bytes of a row of booleans.
FATTN_CONSTEXPR int kGroupCells = 8;
// No window: more keys than a sequence can have.
FATTN_CONSTEXPR int kNoWindow = 1 << 30;
// No end of a window on one side of a row: further than any two positions are apart.
FATTN_CONSTEXPR int kNoLimit = 0x7fffffff;
// Chunks of decode (schedule.h): a sequence has at most kFewChunks until they are of kLargeChunk keys.
FATTN_CONSTEXPR int kFewChunks = 32;
FATTN_CONSTEXPR int kLargeChunk = 512;
// Columns of a row of an int4 cache that share a scale and a minimum.
FATTN_CONSTEXPR int kInt4Group = 32;
// Dimensions of a tensor of logits, beside the columns of a row.
FATTN_CONSTEXPR int kLogitsDims = 5;
// Columns of logits that are read and written at once.
FATTN_CONSTEXPR int kLogitsVector = 4;
// Of a row of a part: its largest logit in score units, the same in natural ones, the sum of its weights, and
// log2 of the weight that a score unit makes.
FATTN_CONSTEXPR int kSumFloats = 4;
// The same without the last, which all parts share: what merge keeps of a row.
FATTN_CONSTEXPR int kMergeSumFloats = 3;
// Columns that merge sums at a time: four per lane.
FATTN_CONSTEXPR int kMergeColumns = 4 * kSimdWidth;
// Columns of its states that decode adds up at a time.
FATTN_CONSTEXPR int kStateColumns = 64;
// Rows of a staged K or V tile are this much longer than the head, so that what the lanes of a simdgroup read
// together (tile.h) lies in different banks: of K, 16 bytes in each of eight rows; of V, 64 bytes.
FATTN_CONSTEXPR int kKeyPadBytes = 16;
FATTN_CONSTEXPR int kValuePadBytes = 64;

}  // namespace fattn
