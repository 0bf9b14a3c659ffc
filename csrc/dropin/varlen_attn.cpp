// Implements the ops behind torch.nn.attention.varlen on MPS, where torch has no kernels: packed calls by
// fattn.varlen_prefill, calls with a block table by fattn.paged_prefill.
#include <optional>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>

#include <ATen/ExpandUtils.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/add.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <torch/library.h>

#include "install.h"
#include "routing.h"
#include "../describe/tensor_checks.h"

namespace fattn {
namespace {

using at::Tensor;
using Results = std::tuple<Tensor, Tensor>;
using Optional = const std::optional<Tensor>&;

// Reads arguments by name: the schema grows from one version of torch to the next.
class Arguments {
 public:
  Arguments(const c10::OperatorHandle& op, const torch::jit::Stack& stack)
      : schema_(op.schema()), values_(torch::jit::last(stack, op.schema().arguments().size())) {}

  c10::IValue operator[](const char* name) const {
    const std::optional<int> index = schema_.argumentIndexWithName(name);
    return index ? values_[static_cast<size_t>(*index)] : c10::IValue();
  }
  Tensor tensor(const char* name) const { return (*this)[name].toTensor(); }
  std::optional<Tensor> optional_tensor(const char* name) const {
    const c10::IValue value = (*this)[name];
    return value.isNone() ? std::nullopt : value.toOptional<Tensor>();
  }
  int64_t window(const char* name) const {
    const c10::IValue value = (*this)[name];
    return value.isNone() ? -1 : value.toInt();
  }

 private:
  const c10::FunctionSchema& schema_;
  at::ArrayRef<c10::IValue> values_;
};

struct Options {
  bool is_causal;
  int64_t window_left, window_right;
  std::optional<Tensor> alibi_slopes;
  std::optional<double> scale;
};

Options options_of(const Arguments& arguments) {
  Options options{arguments["is_causal"].toBool(), arguments.window("window_size_left"),
                  arguments.window("window_size_right"), arguments.optional_tensor("alibi_slopes"),
                  arguments["scale"].toOptional<double>()};
  TORCH_CHECK_NOT_IMPLEMENTED(
      arguments["dropout_p"].toDouble() == 0.0,
      "torch_fattn: _flash_attention_forward on mps has no dropout; call it with dropout_p=0.0");
  // flash-attn's ALiBi depends on the absolute distance. Ours is equal if no row sees a later key.
  TORCH_CHECK_NOT_IMPLEMENTED(
      !options.alibi_slopes || options.is_causal || options.window_right == 0,
      "torch_fattn: _flash_attention_forward on mps takes alibi_slopes only with is_causal=True");
  return options;
}

Results packed(const Arguments& arguments, const Tensor& key, const Tensor& value, const Options& options) {
  static const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("fattn::varlen_prefill", "")
          .typed<Results(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, int64_t,
                         int64_t, bool, std::optional<int64_t>, int64_t, int64_t, int64_t, Optional, Optional,
                         double, std::optional<double>)>();
  Results results = op.call(arguments.tensor("query"), key, value, arguments.tensor("cum_seq_q"),
                            arguments.tensor("cum_seq_k"), arguments["max_q"].toInt(),
                            arguments["max_k"].toInt(), options.is_causal, std::nullopt, options.window_left,
                            options.window_right, 0, std::nullopt, options.alibi_slopes, 0.0, options.scale);
  count(Taken::kPacked);
  return results;
}

Results paged(const Arguments& arguments, const Tensor& key, const Tensor& value, const Tensor& block_table,
              const Tensor& seq_lens, const Options& options) {
  static const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("fattn::paged_prefill", "")
          .typed<Results(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                         const Tensor&, int64_t, bool, int64_t, int64_t, int64_t, Optional, Optional, double,
                         std::optional<double>, Optional, Optional, c10::string_view)>();
  Results results =
      op.call(arguments.tensor("query"), key, value, block_table, seq_lens, arguments.tensor("cum_seq_q"),
              arguments["max_q"].toInt(), options.is_causal, options.window_left, options.window_right, 0,
              std::nullopt, options.alibi_slopes, 0.0, options.scale, std::nullopt, std::nullopt, "auto");
  count(Taken::kPaged);
  return results;
}

// Packed keys as a pool with one key per block: seqused_k may use fewer keys than a sequence has.
Tensor table_of_keys(const Tensor& cu_seqlens_k, int64_t max_k) {
  const Tensor first = cu_seqlens_k.slice(0, 0, cu_seqlens_k.size(0) - 1).unsqueeze(1);
  return at::add(first, at::arange(max_k, cu_seqlens_k.options()));
}

// Unpacked operands [B, L, H, D].
Results dense(const Tensor& query, const Tensor& key, const Tensor& value, const Options& options) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("fattn::prefill", "")
                             .typed<Results(const Tensor&, const Tensor&, const Tensor&, Optional, Optional,
                                            bool, std::optional<int64_t>, int64_t, int64_t, int64_t, Optional,
                                            Optional, double, std::optional<double>, bool)>();
  auto [out, lse] =
      op.call(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), std::nullopt, std::nullopt,
              options.is_causal, std::nullopt, options.window_left, options.window_right, 0, std::nullopt,
              options.alibi_slopes, 0.0, options.scale, /*token_major_out=*/true);
  count(Taken::kPrefill);
  return {out.transpose(1, 2), lse};
}

void check_types(const Arguments& arguments) {
  for (const char* name : {"cum_seq_q", "cum_seq_k", "seqused_k", "block_table"}) {
    if (const auto given = arguments.optional_tensor(name))
      check_int32("torch_fattn: _flash_attention_forward", name, *given);
  }
}

Results attend(const Arguments& arguments) {
  check_types(arguments);
  const Options options = options_of(arguments);
  const Tensor key = arguments.tensor("key"), value = arguments.tensor("value");
  const auto seqused_k = arguments.optional_tensor("seqused_k");
  const auto block_table = arguments.optional_tensor("block_table");
  if (!arguments.optional_tensor("cum_seq_q")) {
    TORCH_CHECK_NOT_IMPLEMENTED(!seqused_k && !block_table,
                                "torch_fattn: _flash_attention_forward on mps takes seqused_k and "
                                "block_table only with cum_seq_q");
    return dense(arguments.tensor("query"), key, value, options);
  }
  if (block_table) {
    TORCH_CHECK_VALUE(seqused_k,
                      "torch_fattn: _flash_attention_forward with a block_table needs seqused_k, the length "
                      "of each sequence");
    return paged(arguments, key, value, *block_table, *seqused_k, options);
  }
  TORCH_CHECK_VALUE(arguments.optional_tensor("cum_seq_k"),
                    "torch_fattn: _flash_attention_forward without a block_table needs cum_seq_k");
  if (!seqused_k) return packed(arguments, key, value, options);
  const Tensor table = table_of_keys(arguments.tensor("cum_seq_k"), arguments["max_k"].toInt());
  return paged(arguments, key.unsqueeze(1), value.unsqueeze(1), table, *seqused_k, options);
}

// Gives out the dimension order of query, as torch does and as its fake kernel promises torch.compile.
Tensor laid_out_as(const Tensor& query, const Tensor& out) {
  if (query.is_contiguous()) return out;
  const auto strides = at::infer_dense_strides(out.sizes(), query.strides());
  const Tensor laid_out = at::empty_strided(out.sizes(), strides, out.options());
  return laid_out.is_contiguous() ? out : laid_out.copy_(out);
}

void flash_attention_forward(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const Arguments arguments(op, *stack);
  auto [result, lse] = attend(arguments);
  Tensor out = laid_out_as(arguments.tensor("query"), result);
  torch::jit::drop(*stack, op.schema().arguments().size());
  const auto on_device = out.options();
  stack->emplace_back(std::move(out));
  stack->emplace_back(std::move(lse));
  // The state of dropout, which is unused, and outputs that torch's callers ignore.
  stack->emplace_back(at::empty({2}, on_device.dtype(at::kUInt64)));
  stack->emplace_back(at::empty({0}, on_device));
  stack->emplace_back(at::empty({0}, on_device));
}

void flash_attention_forward_into(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const Arguments arguments(op, *stack);
  auto [result, lse] = attend(arguments);
  arguments.tensor("out").copy_(result);
  torch::jit::drop(*stack, op.schema().arguments().size());
  stack->emplace_back(std::move(lse));
}

void refuse_backward(const c10::OperatorHandle&, torch::jit::Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false,
      "torch_fattn: varlen_attn has no backward on mps; call it under torch.no_grad(), or where gradients "
      "are needed torch.nn.functional.scaled_dot_product_attention of each sequence");
}

using BoxedKernel = void (*)(const c10::OperatorHandle&, torch::jit::Stack*);

// The kernels that torch had before ours: on a Mac a refusal, or the CPU's under PYTORCH_ENABLE_MPS_FALLBACK.
std::unordered_map<std::string, c10::SafeKernelFunction>& before_us() {
  static auto& kernels = *new std::unordered_map<std::string, c10::SafeKernelFunction>;
  return kernels;
}

template <BoxedKernel kernel>
void if_installed(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  if (is_installed()) {
    kernel(op, stack);
  } else {
    const auto before = before_us().find(op.schema().name());
    TORCH_CHECK_NOT_IMPLEMENTED(before != before_us().end(), op.schema().name(),
                                " has no implementation on mps; torch_fattn.install() provides one");
    before->second.callBoxed(op, keys, stack);
  }
}

template <BoxedKernel kernel>
void register_kernel(torch::Library& library, const char* name) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
  if (op.hasComputedKernelForDispatchKey(c10::DispatchKey::MPS)) {
    before_us().emplace(name, op.getComputedKernelForDispatchKey(c10::DispatchKey::MPS));
  }
  library.impl(name, torch::CppFunction::makeFromBoxedFunction<&if_installed<kernel>>());
}

}  // namespace

void register_varlen_attn(torch::Library& library) {
  register_kernel<flash_attention_forward>(library, "aten::_flash_attention_forward");
  register_kernel<flash_attention_forward_into>(library, "aten::_flash_attention_forward_no_dropout_inplace");
  register_kernel<refuse_backward>(library, "aten::_flash_attention_backward");
}

}  // namespace fattn
