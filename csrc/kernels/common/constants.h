// Function constants: the optional features of a pipeline.
#pragma once

#include <metal_stdlib>

#include "params.h"

using namespace metal;

// Declared at global scope, as in all public Metal code.
FATTN_FUNCTION_CONSTANTS(FATTN_DECLARE_CONSTANT)

// Whether optional buffers are bound.
constant bool fc_has_mask = fc_mask != fattn::kMaskNone;
constant bool fc_additive_mask = fc_mask > fattn::kMaskBool;
constant bool fc_paged = fc_block_size != 0;
constant bool fc_whole = !fc_split;
// Whether the map is a block mask: a byte per block, not 0 if it is visible.
constant bool fc_block_mask = fc_mask_map && !fc_has_mask;
// Whether a mask may hide a key from all rows that see it by position. A block mask hides whole fragments of
// keys, which are not multiplied.
constant bool fc_hides_any = fc_has_mask || fc_tree;

// Whether the rows of a prefill tile are (row, head) pairs.
constant bool fc_pairs = fc_packed || fc_grouped;
