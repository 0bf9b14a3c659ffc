#include "options.h"

#include <array>
#include <cmath>

#include <c10/util/Exception.h>

#include "tensor_checks.h"

namespace fattn {

using at::Tensor;

namespace {

// One number per query head, or per sequence and query head, in float32 as the kernels read it.
Tensor per_head(const Call& call, const char* name, const Tensor& numbers, bool by_sequence = false) {
  const char* op = name_of(call.problem.op);
  if (by_sequence && numbers.dim() == 2) {
    check_same_size(op, "batch size", "query", call.problem.batch, name, numbers.size(0));
  } else {
    check_rank(op, name, numbers, 1, by_sequence ? "[query heads] or [batch, query heads]" : "[query heads]");
  }
  check_device(op, name, numbers, call.query);
  check_float(op, name, numbers);
  check_same_size(op, "head count", "query", call.problem.q_heads, name, numbers.size(-1));
  return numbers.to(at::kFloat);
}

}  // namespace

void add_window(Call& call, int64_t window_left, int64_t window_right, int64_t sink_tokens) {
  ScoreOptions& options = call.problem.options;
  options.window_left = window_left;
  options.window_right = window_right;
  options.sink_tokens = sink_tokens;
}

void add_modifiers(Call& call, const OptionalTensor& sinks, const OptionalTensor& alibi_slopes,
                   double softcap) {
  ScoreOptions& options = call.problem.options;
  options.softcap = softcap;
  if (sinks.has_value()) {
    call.sinks = per_head(call, "sinks", *sinks);
    options.sinks = true;
    options.sinks_stride = call.sinks.stride(0);
  }
  if (alibi_slopes.has_value()) {
    call.alibi_slopes = per_head(call, "alibi_slopes", *alibi_slopes, /*by_sequence=*/true);
    options.alibi_slopes =
        call.alibi_slopes.dim() == 1 || call.problem.batch > 0;  // else all rows belong to no sequence
    options.alibi_slopes_batch_stride = call.alibi_slopes.dim() == 2 ? call.alibi_slopes.stride(0) : 0;
    options.alibi_slopes_stride = call.alibi_slopes.stride(-1);
  }
}

void add_tree_mask(Call& call, const OptionalTensor& tree_mask) {
  if (!tree_mask.has_value()) return;
  Problem& problem = call.problem;
  const char* name = name_of(problem.op);
  const Tensor& mask = *tree_mask;
  check_device(name, "tree_mask", mask, call.query);
  TORCH_CHECK_TYPE(mask.scalar_type() == at::kLong, name, ": tree_mask is ", dtype_name(mask),
                   " and must be torch.int64 (bit t: draft token t is visible)");
  const std::array<int64_t, 2> target = {problem.batch, problem.q_len};
  TORCH_CHECK_VALUE((mask.dim() == 1 && mask.size(0) == problem.q_len) ||
                        (mask.dim() == 2 && mask.sizes() == at::IntArrayRef(target)),
                    name, ": tree_mask has shape ", mask.sizes(),
                    " and must be [q_len] or [batch, q_len] = ", at::IntArrayRef(target));
  problem.options.tree_mask = true;
  problem.options.tree_mask_batch_stride = mask.dim() == 2 ? mask.stride(0) : 0;
  problem.options.tree_mask_row_stride = mask.stride(-1);
  call.tree_mask = mask;
}

void add_scale(Call& call, std::optional<double> scale) {
  call.problem.scale = scale.value_or(1.0 / std::sqrt(static_cast<double>(call.problem.head_dim)));
}

}  // namespace fattn
