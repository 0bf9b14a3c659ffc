// Implements the ops behind torch.nn.attention.varlen on MPS, where torch has no kernels: packed calls with
// fattn.varlen_prefill, their backward with fattn.varlen_prefill_backward, and calls with a block table with
// fattn.paged_prefill.
#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <utility>

#include <ATen/ExpandUtils.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/stack.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/library.h>

#include "install.h"
#include "routing.h"
#include "../describe/arguments.h"
#include "../describe/tensor_checks.h"

namespace fattn {
namespace {

using at::Tensor;
using Results = std::tuple<Tensor, Tensor>;

// An argument that the schema has only in newer versions of torch.
c10::IValue newer(const Arguments& arguments, std::string_view name) {
  return arguments.has(name) ? arguments[name] : c10::IValue();
}
std::optional<Tensor> newer_tensor(const Arguments& arguments, std::string_view name) {
  return newer(arguments, name).toOptional<Tensor>();
}

// Sets the options of torch's op under our names.
void set_options(Invocation& call, const Arguments& arguments) {
  const bool is_causal = arguments.get<bool>("is_causal");
  const auto window_left = newer(arguments, "window_size_left").toOptional<int64_t>();
  const auto window_right = newer(arguments, "window_size_right").toOptional<int64_t>();
  const auto alibi_slopes = newer_tensor(arguments, "alibi_slopes");
  TORCH_CHECK_NOT_IMPLEMENTED(
      arguments.get<double>("dropout_p") == 0.0,
      "torch_fattn: _flash_attention_forward on mps has no dropout; call it with dropout_p=0.0");
  // flash-attn's ALiBi depends on the absolute distance. Ours is equal if no row sees a later key.
  TORCH_CHECK_NOT_IMPLEMENTED(
      !alibi_slopes || is_causal || window_right == 0,
      "torch_fattn: _flash_attention_forward on mps takes alibi_slopes only with is_causal=True");
  call.set("is_causal", is_causal).set("alibi_slopes", alibi_slopes).set("scale", arguments["scale"]);
  call.set("window_left", window_left.value_or(-1)).set("window_right", window_right.value_or(-1));
}

Results results_of(Invocation call) {
  const torch::jit::Stack results = std::move(call).call();
  return {results[0].toTensor(), results[1].toTensor()};
}

// `seqused_k`: the number of used keys per sequence, if not all. The unused keys of each sequence then form a
// sequence without rows that follows it.
Results packed(const Arguments& arguments, const std::optional<Tensor>& seqused_k) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("fattn::varlen_prefill", "");
  Invocation call(op);
  set_options(call, arguments);
  Tensor rows = arguments.tensor("cum_seq_q"), keys = arguments.tensor("cum_seq_k");
  if (seqused_k) {
    const Tensor first = keys.slice(0, 0, keys.size(0) - 1);
    const Tensor end = first.add(seqused_k->clamp_min(0).minimum(keys.diff()));
    keys = at::cat({at::stack({first, end}, 1).flatten(), keys.slice(0, keys.size(0) - 1)});
    rows = rows.repeat_interleave(2).slice(0, 1);
    const auto slopes = newer_tensor(arguments, "alibi_slopes");
    if (slopes && slopes->dim() == 2) call.set("alibi_slopes", slopes->repeat_interleave(2, 0));
  }
  for (const char* name : {"query", "key", "value"}) call.set(name, arguments[name]);
  call.set("cu_seqlens_q", rows).set("cu_seqlens_k", keys);
  call.set("max_seqlen_q", arguments["max_q"]).set("max_seqlen_k", arguments["max_k"]);
  Results results = results_of(std::move(call));
  count(Taken::kPacked);
  return results;
}

Results paged(const Arguments& arguments, const Tensor& key, const Tensor& value, const Tensor& block_table,
              const Tensor& seq_lens) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("fattn::paged_prefill", "");
  Invocation call(op);
  set_options(call, arguments);
  call.set("query", arguments["query"]).set("key_cache", key).set("value_cache", value);
  call.set("block_tables", block_table).set("seq_lens", seq_lens);
  call.set("cu_seqlens_q", arguments["cum_seq_q"]).set("max_seqlen_q", arguments["max_q"]);
  Results results = results_of(std::move(call));
  count(Taken::kPaged);
  return results;
}

// Unpacked operands [B, L, H, D].
Results dense(const Arguments& arguments, const Tensor& key, const Tensor& value) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("fattn::prefill", "");
  Invocation call(op);
  set_options(call, arguments);
  call.set("query", arguments.tensor("query").transpose(1, 2)).set("key", key.transpose(1, 2));
  call.set("value", value.transpose(1, 2)).set("token_major_out", true);
  auto [out, lse] = results_of(std::move(call));
  count(Taken::kPrefill);
  return {out.transpose(1, 2), lse};
}

void check_types(const Arguments& arguments) {
  for (const char* name : {"cum_seq_q", "cum_seq_k", "seqused_k", "block_table"}) {
    if (const auto given = newer_tensor(arguments, name))
      check_int32("torch_fattn: _flash_attention_forward", name, *given);
  }
}

Results attend(const Arguments& arguments) {
  check_types(arguments);
  const Tensor &key = arguments.tensor("key"), &value = arguments.tensor("value");
  const auto seqused_k = newer_tensor(arguments, "seqused_k");
  const auto block_table = newer_tensor(arguments, "block_table");
  if (!arguments.optional_tensor("cum_seq_q")) {
    TORCH_CHECK_NOT_IMPLEMENTED(!seqused_k && !block_table,
                                "torch_fattn: _flash_attention_forward on mps takes seqused_k and "
                                "block_table only with cum_seq_q");
    return dense(arguments, key, value);
  }
  if (block_table) {
    TORCH_CHECK_VALUE(seqused_k,
                      "torch_fattn: _flash_attention_forward with a block_table needs seqused_k, the length "
                      "of each sequence");
    return paged(arguments, key, value, *block_table, *seqused_k);
  }
  TORCH_CHECK_VALUE(arguments.optional_tensor("cum_seq_k"),
                    "torch_fattn: _flash_attention_forward without a block_table needs cum_seq_k");
  return packed(arguments, seqused_k);
}

// Gives `out` the dimension order of query, as torch does and as its fake kernel promises torch.compile.
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
  // The unused state of dropout, and outputs that torch's callers ignore.
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

void flash_attention_backward(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  static const auto backward =
      c10::Dispatcher::singleton().findSchemaOrThrow("fattn::varlen_prefill_backward", "");
  const Arguments arguments(op, *stack);
  const auto window_left = arguments["window_size_left"].toOptional<int64_t>();
  const auto window_right = arguments["window_size_right"].toOptional<int64_t>();
  Invocation call(backward);
  call.set("grad_out", arguments["grad_out"]).set("out", arguments["out"]).set("lse", arguments["logsumexp"]);
  for (const char* name : {"query", "key", "value", "is_causal", "scale"}) call.set(name, arguments[name]);
  call.set("cu_seqlens_q", arguments["cum_seq_q"]).set("cu_seqlens_k", arguments["cum_seq_k"]);
  call.set("max_seqlen_q", arguments["max_q"]).set("max_seqlen_k", arguments["max_k"]);
  call.set("window_left", window_left.value_or(-1)).set("window_right", window_right.value_or(-1));
  const torch::jit::Stack gradients = std::move(call).call();
  const std::array<Tensor, 3> operands = {arguments.tensor("query"), arguments.tensor("key"),
                                          arguments.tensor("value")};
  torch::jit::drop(*stack, op.schema().arguments().size());
  for (size_t i = 0; i < operands.size(); ++i) {
    stack->emplace_back(laid_out_as(operands[i], gradients[i].toTensor()));
  }
}

using BoxedKernel = void (*)(const c10::OperatorHandle&, torch::jit::Stack*);

// The kernels that ours replaced: on a Mac a refusal, or the CPU's under PYTORCH_ENABLE_MPS_FALLBACK.
std::unordered_map<std::string, c10::SafeKernelFunction>& before_us() {
  static auto& kernels = *new std::unordered_map<std::string, c10::SafeKernelFunction>;
  return kernels;
}

// A graph may be differentiated, and a checkpoint in it recomputed, after the installation that made it.
bool is_ours() { return is_installed() || torch::autograd::get_current_graph_task_id() != -1; }

template <BoxedKernel kernel>
void if_ours(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  if (is_ours()) {
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
  library.impl(name, torch::CppFunction::makeFromBoxedFunction<&if_ours<kernel>>());
}

}  // namespace

void register_varlen_attn(torch::Library& library) {
  register_kernel<flash_attention_forward>(library, "aten::_flash_attention_forward");
  register_kernel<flash_attention_forward_into>(library, "aten::_flash_attention_forward_no_dropout_inplace");
  register_kernel<flash_attention_backward>(library, "aten::_flash_attention_backward");
}

}  // namespace fattn
