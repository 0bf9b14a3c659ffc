// What a pipeline is specialised by: macros set when the source is compiled (dtype, head dims, tile),
// function constants set when the pipeline is made (features). The planner's KernelSpec is the other side of
// this file.
#pragma once

#include <metal_stdlib>

#include "constants.h"
#include "grid.h"

using namespace metal;

namespace fattn {

typedef FATTN_T Element;  // of query and result: float, half or bfloat

FATTN_CONSTEXPR int kKvFormat = FATTN_KV_FORMAT;  // of K and V: a KvFormat

// What Q, K and V are multiplied as. Half needs no widening: half products are summed in float32 at the same
// rate, from half the registers. Nor does bfloat from M3 on; before, its arithmetic is emulated, and it is
// widened. Half would round the elements of an int4 cache, and overflow where a group reaches beyond its
// range; bfloat would round those of any quantised cache.
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

// Elements of a step in threadgroup memory: as they are, or the exact value of a quantised element without
// its row's scale.
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

// Kernels that read fragments from such a tile define it; others read them from the cache.
#ifndef FATTN_STAGED
#define FATTN_STAGED 0
#endif

// Simdgroups that share out the columns of the same rows; kernels in which they do define it.
#ifndef FATTN_COLUMN_SHARES
#define FATTN_COLUMN_SHARES 1
#endif

// Query rows of a row group of decode; kernels without 8x8 products define it.
#ifndef FATTN_GROUP_ROWS
#define FATTN_GROUP_ROWS 8
#endif

FATTN_CONSTEXPR int kHeadDim = FATTN_HEAD_DIM;
FATTN_CONSTEXPR int kValueDim = FATTN_VALUE_DIM;
FATTN_CONSTEXPR int kRowFragments = FATTN_ROW_FRAGMENTS;  // 8-row fragments per simdgroup
FATTN_CONSTEXPR int kTileKeys = FATTN_TILE_KEYS;          // keys per step
FATTN_CONSTEXPR int kKeyFragments = FATTN_TILE_KEYS / kFragment;
FATTN_CONSTEXPR int kSimdgroups = FATTN_SIMDGROUPS;
// In a threadgroup: of kGroupRows each in decode, of kRowFragments * 8 each in prefill_wide.
FATTN_CONSTEXPR int kRowGroups = FATTN_ROW_GROUPS;
FATTN_CONSTEXPR int kGroupRows = FATTN_GROUP_ROWS;
FATTN_CONSTEXPR int kColumnShares = FATTN_COLUMN_SHARES;
// The kernels promise this number to the compiler, which then fits registers to it: every launch is legal.
FATTN_CONSTEXPR int kThreads = kSimdgroups * kSimdWidth;

}  // namespace fattn
