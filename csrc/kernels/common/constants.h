// Function constants: the features that a pipeline has or has not.
#pragma once

#include <metal_stdlib>

#include "params.h"

using namespace metal;

// Function constants stand at global scope, as in every Metal library we know to compile.
constant uint fc_mask [[function_constant(fattn::kConstMask)]];
constant bool fc_causal [[function_constant(fattn::kConstCausal)]];
constant bool fc_vector_loads [[function_constant(fattn::kConstVectorLoads)]];
constant bool fc_split [[function_constant(fattn::kConstSplit)]];
constant bool fc_has_seq_lens [[function_constant(fattn::kConstHasSeqLens)]];
constant uint fc_block_size [[function_constant(fattn::kConstBlockSize)]];
constant bool fc_window [[function_constant(fattn::kConstWindow)]];
constant bool fc_softcap [[function_constant(fattn::kConstSoftcap)]];
constant bool fc_alibi [[function_constant(fattn::kConstAlibi)]];
constant bool fc_sinks [[function_constant(fattn::kConstSinks)]];
constant bool fc_tree [[function_constant(fattn::kConstTree)]];
constant bool fc_scales [[function_constant(fattn::kConstScales)]];
constant bool fc_packed [[function_constant(fattn::kConstPacked)]];
constant bool fc_sliced [[function_constant(fattn::kConstSliced)]];
constant bool fc_packed_keys [[function_constant(fattn::kConstPackedKeys)]];
constant bool fc_mask_map [[function_constant(fattn::kConstMaskMap)]];
constant bool fc_token_major_out [[function_constant(fattn::kConstTokenMajorOut)]];
constant bool fc_grouped [[function_constant(fattn::kConstGrouped)]];

// Gates of optional buffers.
constant bool fc_has_mask = fc_mask != fattn::kMaskNone;
constant bool fc_additive_mask = fc_mask > fattn::kMaskBool;
constant bool fc_paged = fc_block_size != 0;
constant bool fc_whole = !fc_split;
// Whether a key may be hidden from all rows that see it by position.
constant bool fc_hides_any = fc_has_mask || fc_tree;

// The rows of a tile of prefill are (row, head) pairs.
constant bool fc_pairs = fc_packed || fc_grouped;
