// The memory layout of an operand's rows.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>
#include <utility>

#include <ATen/core/Tensor.h>

#include "../plan/problem.h"

namespace fattn {

// The shapes of operands in error messages.
inline constexpr std::string_view kHeadsFirst = "[batch, heads, length, head_dim]";
inline constexpr std::string_view kPacked = "[rows, heads, head_dim]";

// Layout of an operand after with_contiguous_rows().
struct Layout {
  std::array<int64_t, 3> strides;  // of all dimensions but the last; missing ones come first
  bool vector_aligned;

  Strides3 by_dimension() const { return {strides[0], strides[1], strides[2]}; }
};
Layout layout_of(const at::Tensor& operand);

bool has_contiguous_rows(const at::Tensor& operand);

// For operands with rows before heads: the kernels index head, row.
inline void swap_rows_and_heads(Strides3& strides) { std::swap(strides.head, strides.row); }

}  // namespace fattn
