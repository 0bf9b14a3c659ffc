// Buffer indices of arguments.
#pragma once

namespace softmetal {
// The n-th buffer index without a [[buffer(index)]] in the kernel, for pointers and references without the
// attribute.
template <size_t count>
constexpr uint32_t free_slot(uint32_t n, const uint32_t (&taken)[count]) {
  for (uint32_t slot = 0;; ++slot) {
    bool is_taken = false;
    for (uint32_t other : taken) is_taken = is_taken || other == slot;
    if (!is_taken && n-- == 0) return slot;
  }
}
}  // namespace softmetal
