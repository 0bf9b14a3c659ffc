// What changes scores or hides keys, from the arguments of an op into the Call.
#pragma once

#include <cstdint>
#include <optional>

#include "calls.h"

namespace fattn {

void add_mask(Call& call, const OptionalTensor& attn_mask);
// Of the mask, which is there already.
void add_mask_map(Call& call, const OptionalTensor& mask_map);
void add_window(Call& call, int64_t window_left, int64_t window_right, int64_t sink_tokens);
void add_modifiers(Call& call, const OptionalTensor& sinks, const OptionalTensor& alibi_slopes,
                   double softcap);
void add_tree_mask(Call& call, const OptionalTensor& tree_mask);
// softmax(scale * q.k) with the customary scale where the caller names none.
void add_scale(Call& call, std::optional<double> scale);

}  // namespace fattn
