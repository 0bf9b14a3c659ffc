// Adds the arguments that modify scores or hide keys to a Call.
#pragma once

#include "calls.h"

namespace fattn {

// Adds the options of all attention operators: FATTN_SCORE_OPTIONS and scale.
void add_score_options(Call& call, const Arguments& arguments);
void add_tree_mask(Call& call, const Arguments& arguments);
void add_mask(Call& call, const Arguments& arguments);
// Call it after add_mask.
void add_mask_map(Call& call, const Arguments& arguments);
void add_block_mask(Call& call, const Arguments& arguments);

}  // namespace fattn
