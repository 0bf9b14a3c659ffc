#include "options.h"

#include <cmath>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/ops/arange.h>
#include <c10/util/Exception.h>

#include "tensor_checks.h"

namespace fattn {

using at::Tensor;

namespace {

// "h bh" for messages: "[query heads] or [batch, query heads]".
std::string text_of(std::string_view shapes) {
  std::string text = "[";
  for (size_t i = 0; i < shapes.size(); ++i) {
    if (i > 0) text += shapes[i] == ' ' ? "] or [" : shapes[i - 1] == ' ' ? "" : ", ";
    if (shapes[i] != ' ') text += shapes[i] == 'b' ? "batch" : "query heads";
  }
  return text + "]";
}

// Numbers of one of the shapes, as FATTN_SCORE_OPTIONS has them.
NumberTensor add_numbers(const Call& call, const char* name, std::string_view shapes,
                         const OptionalTensor& given, Tensor& numbers) {
  if (!given.has_value()) return {};
  const char* op = name_of(call.problem.op);
  const int64_t batch = call.problem.batch;
  std::string_view shape = shapes.substr(0, shapes.find(' '));
  if (given->dim() != int64_t(shape.size())) shape = shapes.substr(shapes.find(' ') + 1);
  check_rank(op, name, *given, int64_t(shape.size()), text_of(shapes));
  const bool of_sequences = shape.front() == 'b', of_heads = shape.back() == 'h';
  if (of_sequences) check_same_size(op, "batch size", "query", batch, name, given->size(0));
  check_device(op, name, *given, call.query);
  check_float(op, name, *given);
  if (of_heads) check_same_size(op, "head count", "query", call.problem.q_heads, name, given->size(-1));
  numbers = *given;
  return {.given = !of_sequences || batch > 0,  // without sequences, no row has a number
          .of_sequences = of_sequences,
          .kind = float_kind(dtype_of(numbers.scalar_type())),
          .batch_stride = of_sequences ? numbers.stride(0) : 0,
          .stride = of_heads ? numbers.stride(-1) : 0};
}

// Rows of up to 64 booleans, as bits.
Tensor bits_of(const Tensor& rows) {
  const Tensor bit = at::arange(rows.size(-1), rows.options().dtype(at::kLong));
  return rows.to(at::kLong).bitwise_left_shift(bit).sum(-1);
}

}  // namespace

void add_score_options(Call& call, const Arguments& arguments) {
  ScoreOptions& options = call.problem.options;
#define FATTN_NUMBER(type, name, value) options.name = arguments.get<type>(#name);
#define FATTN_TENSOR(slot, name, shapes) \
  options.name = add_numbers(call, #name, shapes, arguments.optional_tensor(#name), call.name);
  FATTN_SCORE_OPTIONS(FATTN_NUMBER, FATTN_TENSOR)
#undef FATTN_NUMBER
#undef FATTN_TENSOR
  const double usual = 1.0 / std::sqrt(static_cast<double>(call.problem.head_dim));
  call.problem.scale = arguments.get<std::optional<double>>("scale").value_or(usual);
}

void add_tree_mask(Call& call, const Arguments& arguments) {
  const OptionalTensor tree_mask = arguments.optional_tensor("tree_mask");
  if (!tree_mask.has_value()) return;
  Problem& problem = call.problem;
  const char* name = name_of(problem.op);
  const Tensor& mask = *tree_mask;
  check_device(name, "tree_mask", mask, call.query);
  const bool is_bool = mask.scalar_type() == at::kBool;
  TORCH_CHECK_TYPE(is_bool || mask.scalar_type() == at::kLong, name, ": tree_mask is ", dtype_name(mask),
                   " and must be torch.bool [q_len, q_len] or torch.int64 [q_len] (bit t: draft token t is "
                   "visible)");
  std::vector<int64_t> target = {problem.batch, problem.q_len};
  if (is_bool) target.push_back(problem.q_len);
  const at::IntArrayRef of_batch = target;
  TORCH_CHECK_VALUE(
      mask.sizes() == of_batch || mask.sizes() == of_batch.slice(1), name, ": tree_mask has shape ",
      mask.sizes(), " and must be ",
      is_bool ? "[q_len, q_len] or [batch, q_len, q_len] = " : "[q_len] or [batch, q_len] = ", of_batch);
  call.tree_mask = is_bool ? bits_of(mask) : mask;
  problem.options.tree_mask = true;
  problem.options.tree_mask_batch_stride = call.tree_mask.dim() == 2 ? call.tree_mask.stride(0) : 0;
  problem.options.tree_mask_row_stride = call.tree_mask.stride(-1);
}

}  // namespace fattn
