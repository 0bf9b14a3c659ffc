// Shapes of a call of torch's attention: broadcasting, and conversion to the shapes of our ops.
#pragma once

#include <cstdint>
#include <optional>

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include "sdpa.h"

namespace fattn {

inline constexpr int kSdpaRank = 4;

// A size of a tensor of two to four dimensions, with leading 1s as if it had four.
c10::SymInt size_of(const at::Tensor& tensor, int64_t dim);

// Batch and query heads of the result, and the heads of key and value for our ops.
struct Sizes {
  c10::SymInt batch, q_heads, kv_heads;
};
// None if the operands do not broadcast.
std::optional<Sizes> sizes_of(const SdpaCall& call);
// torch refuses to broadcast a call without elements.
bool broadcasts_nothing(const SdpaCall& call, const Sizes& sizes);
// Whether the mask broadcasts to the scores (and not the scores to the mask).
bool mask_fits(const SdpaCall& call, const Sizes& sizes);

// Converts an operand for our ops: four dimensions, broadcast, head size padded to a multiple of 8.
at::Tensor operand_of(const at::Tensor& given, const c10::SymInt& batch, const c10::SymInt& heads);
// Undoes operand_of() on the result.
at::Tensor result_of(at::Tensor out, const SdpaCall& call);

}  // namespace fattn
