// What a pipeline is specialised by: macros set when the source is compiled (dtype, head dims, tile),
// function constants set when the pipeline is made (features). The planner's KernelSpec is the other side of
// this file.
#pragma once

#include <metal_stdlib>

#include "params.h"

using namespace metal;

namespace fattn {

typedef FATTN_T Element;  // float, half or bfloat

FATTN_CONSTEXPR int kHeadDim = FATTN_HEAD_DIM;
FATTN_CONSTEXPR int kValueDim = FATTN_VALUE_DIM;
FATTN_CONSTEXPR int kRowFragments = FATTN_ROW_FRAGMENTS;  // 8-row fragments per simdgroup
FATTN_CONSTEXPR int kTileKeys = FATTN_TILE_KEYS;          // keys per step
FATTN_CONSTEXPR int kKeyFragments = FATTN_TILE_KEYS / kFragment;
FATTN_CONSTEXPR int kSimdgroups = FATTN_SIMDGROUPS;
// The kernels promise this number to the compiler, which then fits registers to it: every launch is legal.
FATTN_CONSTEXPR int kThreads = kSimdgroups * kSimdWidth;

}  // namespace fattn

// Function constants stand at global scope, as in every Metal library we know to compile.
constant uint fc_mask [[function_constant(fattn::kConstMask)]];
constant bool fc_causal [[function_constant(fattn::kConstCausal)]];
constant bool fc_vector_loads [[function_constant(fattn::kConstVectorLoads)]];
constant bool fc_split [[function_constant(fattn::kConstSplit)]];
constant bool fc_has_seq_lens [[function_constant(fattn::kConstHasSeqLens)]];
constant uint fc_block_size [[function_constant(fattn::kConstBlockSize)]];

// Gates of optional buffers.
constant bool fc_has_mask = fc_mask != fattn::kMaskNone;
constant bool fc_additive_mask = fc_mask > fattn::kMaskBool;
constant bool fc_paged = fc_block_size != 0;
constant bool fc_whole = !fc_split;
