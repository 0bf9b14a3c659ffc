// Compile-time parameters of a pipeline: macros (dtype, head dims, tile), set when the source is compiled,
// and function constants (features), set when the pipeline is created. The host's side is KernelSpec in
// plan/plan.h.
#pragma once

#include <metal_stdlib>

#include "constants.h"
#include "grid.h"

using namespace metal;

namespace fattn {

typedef FATTN_T Element;  // query and result: float, half or bfloat

FATTN_CONSTEXPR int kKvFormat = FATTN_KV_FORMAT;  // KvFormat of K and V

// The type in which Q, K and V are multiplied. half products accumulate in float32 at the rate of float
// products, from half the registers; so do bfloat products from M3 on. Older GPUs emulate bfloat, so it is
// widened there. int4 is widened too: half would round its elements, and overflow if a group exceeds its
// range. bfloat would round every quantised format.
static_assert(kKvFormat == kKvInt4 || scales_kind(kKvFormat) != kScalesGroup,
              "only int4 has groups of columns here, in unpack_stored and in StoredRow");
template <typename T, int kFormat, bool kNativeBFloat>
struct OperandOf {
  typedef float type;
};
template <int kFormat, bool kNativeBFloat>
struct OperandOf<half, kFormat, kNativeBFloat> {
  typedef half type;
};
template <bool kNativeBFloat>
struct OperandOf<half, kKvInt4, kNativeBFloat> {
  typedef float type;
};
template <>
struct OperandOf<bfloat, kKvFloat, true> {
  typedef bfloat type;
};
typedef OperandOf<Element, kKvFormat, FATTN_NATIVE_BFLOAT>::type Operand;

// The element type of a step in threadgroup memory. Quantised elements are decoded exactly: int4 with the
// scale and minimum of its group, int8 and fp8 without the scale of their row.
template <int kFormat>
struct TileElementOf {
  typedef half type;
};
template <>
struct TileElementOf<kKvFloat> {
  typedef Element type;
};
template <>
struct TileElementOf<kKvInt4> {
  typedef float type;
};
typedef TileElementOf<kKvFormat>::type TileElement;

// 1 in kernels that read fragments of K and V from threadgroup memory.
#ifndef FATTN_STAGED
#define FATTN_STAGED 0
#endif

// The number of simdgroups that divide the columns of the same rows.
#ifndef FATTN_COLUMN_SHARES
#define FATTN_COLUMN_SHARES 1
#endif

// Query rows of a row group of decode; kernels without 8x8 products define it.
#ifndef FATTN_GROUP_ROWS
#define FATTN_GROUP_ROWS 8
#endif

// decode: chunks of a sequence in flight per threadgroup, each with kSimdgroups simdgroups.
#ifndef FATTN_CHUNKS
#define FATTN_CHUNKS 1
#endif
// decode: rounds of FATTN_CHUNKS chunks.
#ifndef FATTN_CHUNK_ROUNDS
#define FATTN_CHUNK_ROUNDS 1
#endif

FATTN_CONSTEXPR int kHeadDim = FATTN_HEAD_DIM;
FATTN_CONSTEXPR int kValueDim = FATTN_VALUE_DIM;
FATTN_CONSTEXPR int kRowFragments = FATTN_ROW_FRAGMENTS;  // 8-row fragments per simdgroup
FATTN_CONSTEXPR int kTileKeys = FATTN_TILE_KEYS;          // keys per step
FATTN_CONSTEXPR int kKeyFragments = FATTN_TILE_KEYS / kFragment;
FATTN_CONSTEXPR int kSimdgroups = FATTN_SIMDGROUPS;
// Row groups per threadgroup: of kGroupRows rows in decode, of kRowFragments * 8 in prefill_wide.
FATTN_CONSTEXPR int kRowGroups = FATTN_ROW_GROUPS;
FATTN_CONSTEXPR int kGroupRows = FATTN_GROUP_ROWS;
FATTN_CONSTEXPR int kColumnShares = FATTN_COLUMN_SHARES;
FATTN_CONSTEXPR int kChunks = FATTN_CHUNKS;
FATTN_CONSTEXPR int kChunkRounds = FATTN_CHUNK_ROUNDS;
// The kernels declare this limit, and the compiler fits their registers to it, so that every launch is legal.
FATTN_CONSTEXPR int kThreads = kChunks * kSimdgroups * kSimdWidth;

}  // namespace fattn
