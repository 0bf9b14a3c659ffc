#include "options.h"

#include <array>
#include <cmath>
#include <optional>
#include <string>
#include <string_view>

#include <c10/util/Exception.h>

#include "tensor_checks.h"

namespace fattn {

using at::Tensor;

namespace {

// "h bh" as a message has it: "[query heads] or [batch, query heads]".
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

}  // namespace fattn
