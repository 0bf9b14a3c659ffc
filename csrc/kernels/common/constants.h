// Function constants: the features that a pipeline has or has not.
#pragma once

#include <metal_stdlib>

#include "params.h"

using namespace metal;

// Function constants stand at global scope, as in every Metal library we know to compile.
FATTN_FUNCTION_CONSTANTS(FATTN_DECLARE_CONSTANT)

// Gates of optional buffers.
constant bool fc_has_mask = fc_mask != fattn::kMaskNone;
constant bool fc_additive_mask = fc_mask > fattn::kMaskBool;
constant bool fc_paged = fc_block_size != 0;
constant bool fc_whole = !fc_split;
// Whether a key may be hidden from all rows that see it by position.
constant bool fc_hides_any = fc_has_mask || fc_tree;

// The rows of a tile of prefill are (row, head) pairs.
constant bool fc_pairs = fc_packed || fc_grouped;
