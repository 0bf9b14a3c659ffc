// What a pipeline is specialised by: macros set when the source is compiled (dtype, head dims, tile),
// function constants set when the pipeline is made (features). The planner's KernelSpec is the other side of
// this file.
#pragma once

#include <metal_stdlib>

#include "constants.h"

using namespace metal;

namespace fattn {

typedef FATTN_T Element;  // float, half or bfloat

FATTN_CONSTEXPR int kHeadDim = FATTN_HEAD_DIM;
FATTN_CONSTEXPR int kValueDim = FATTN_VALUE_DIM;
FATTN_CONSTEXPR int kRowFragments = FATTN_ROW_FRAGMENTS;  // 8-row fragments per simdgroup
FATTN_CONSTEXPR int kTileKeys = FATTN_TILE_KEYS;          // keys per step
FATTN_CONSTEXPR int kKeyFragments = FATTN_TILE_KEYS / kFragment;
FATTN_CONSTEXPR int kSimdgroups = FATTN_SIMDGROUPS;
FATTN_CONSTEXPR int kRowGroups = FATTN_ROW_GROUPS;  // decode: of eight rows each, in a threadgroup
// The kernels promise this number to the compiler, which then fits registers to it: every launch is legal.
FATTN_CONSTEXPR int kThreads = kSimdgroups * kSimdWidth;

}  // namespace fattn
