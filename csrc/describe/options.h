// Adds the arguments that change scores or hide keys to a Call.
#pragma once

#include <cstdint>
#include <optional>

#include "calls.h"

namespace fattn {

void add_mask(Call& call, const OptionalTensor& attn_mask);
// Call it after add_mask.
void add_mask_map(Call& call, const OptionalTensor& mask_map);
void add_window(Call& call, int64_t window_left, int64_t window_right, int64_t sink_tokens);
void add_modifiers(Call& call, const OptionalTensor& sinks, const OptionalTensor& alibi_slopes,
                   double softcap);
void add_tree_mask(Call& call, const OptionalTensor& tree_mask);
// softmax(scale * q.k) with 1 / sqrt(head_dim) if the caller passes no scale.
void add_scale(Call& call, std::optional<double> scale);

}  // namespace fattn
