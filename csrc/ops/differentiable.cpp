// The gradients of fattn.attention and fattn.varlen_attention: a graph node that keeps the operands and the
// log-sum-exp of the rows. It calls the backward operator through the dispatcher, so that torch.compile,
// torch.func and checkpointing intercept it.
#include <array>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/jit_type.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>
#include <torch/library.h>

#include "../describe/arguments.h"
#include "../plan/score_options.h"
#include "../plan/supported.h"
#include "autograd.h"

namespace fattn {
namespace {

using at::Tensor;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

// The operands with a gradient, in the order of the backward operator's results.
constexpr std::array<const char*, 5> kDifferentiable = {"query", "key", "value", "sinks", "alibi_slopes"};

// A call of a backward operator without its tensors, which compiled autograd passes through a graph.
struct BackwardInvocation {
  const c10::OperatorHandle* op;
  std::vector<std::pair<const char*, c10::IValue>> numbers;
  std::vector<const char*> names;  // of the tensors
  std::array<bool, kDifferentiable.size()> needed;

  variable_list gradients(const variable_list& grads, at::ArrayRef<c10::IValue> tensors) const {
    Invocation call(*op);
    for (const auto& [name, number] : numbers) call.set(name, number);
    Tensor query, value;
    for (size_t i = 0; i < names.size(); ++i) {
      call.set(names[i], tensors[i]);
      if (std::string_view(names[i]) == "query") query = tensors[i].toTensor();
      if (std::string_view(names[i]) == "value") value = tensors[i].toTensor();
    }
    call.set("grad_out", grads[0].defined() ? grads[0] : zeros_of_result(query, value));
    if (grads[1].defined()) call.set("grad_lse", grads[1]);
    const torch::jit::Stack results = std::move(call).call();
    variable_list gradients(needed.size());
    for (size_t i = 0; i < needed.size(); ++i) {
      if (needed[i]) gradients[i] = results[i].toTensor();
    }
    return gradients;
  }

 private:
  static Tensor zeros_of_result(const Tensor& query, const Tensor& value) {
    c10::SymDimVector sizes(query.sym_sizes());
    sizes.back() = value.sym_size(-1);
    return query.new_zeros_symint(sizes);
  }
};

class AttentionBackward : public torch::autograd::Node {
 public:
  AttentionBackward(const c10::OperatorHandle& backward, const c10::OperatorHandle& op,
                    const torch::jit::Stack& stack, const variable_list& inputs)
      : Node(torch::autograd::collect_next_edges(inputs)), backward_(backward) {
    const auto& arguments = op.schema().arguments();
    const auto values = torch::jit::last(stack, arguments.size());
    for (size_t i = 0; i < arguments.size(); ++i) {
      const c10::IValue& value = values[i];
      if (value.isNone()) continue;
      const char* name = arguments[i].name().c_str();  // the schema lives as long as the process
      if (value.isTensor()) {
        keep(name, value.toTensor(), /*is_output=*/false);
      } else {
        numbers_.emplace_back(name, value);
      }
    }
  }

  // Call it after set_history: out and lse are outputs of this node. A 16-bit `out` is kept only with its
  // remainder: in rows with one dominant key its products with the gradient cancel, and its rounding error
  // would dominate.
  void keep_results(const Tensor& out, const Tensor& lse, const Tensor* remainder) {
    if (remainder || out.scalar_type() == at::kFloat) keep("out", out, /*is_output=*/true);
    keep("lse", lse, /*is_output=*/true);
    if (remainder) keep("out_remainder", *remainder, /*is_output=*/false);
  }

  variable_list apply(variable_list&& grads) override {
    const std::lock_guard lock(mutex_);
    return backward_call().gradients(grads, unpacked());
  }

  // The two functions of compiled autograd: the key of the graph, and the backward call in a graph with the
  // tensors as inputs. Numbers are constants of the graph.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    args.collect(backward_.schema().name());
    for (const auto& [name, number] : numbers_) {
      args.collect(std::string(name));
      args.collect(number, /*nested=*/true);
    }
    for (const Kept& kept : kept_) {
      args.collect(std::string(kept.name));
      args.collect(kept.tensor, kept.is_output);
    }
  }

  variable_list apply_with_saved(const variable_list& grads,
                                 torch::dynamo::autograd::SwapSavedVariables& saved) override {
    using torch::dynamo::autograd::IValuePacker;
    for (Kept& kept : kept_) saved.before(kept.tensor);
    const auto run = [call = backward_call()](const variable_list& inputs,
                                              const std::vector<c10::IValue>& tensors) {
      return call.gradients(inputs, tensors);
    };
    const auto& python = torch::dynamo::autograd::getPyCompilerInterface();
    const std::string bound = python->bind_function(
        saved.get_py_compiler(), name(), run, std::vector<at::TypePtr>(kept_.size(), at::TensorType::get()),
        /*is_custom_function=*/true, /*is_traceable=*/true);
    const auto results = IValuePacker<std::vector<std::optional<torch::autograd::InputMetadata>>>::pack(
        torch::dynamo::autograd::get_input_metadata(next_edges()));
    variable_list gradients =
        python->call_function(saved.get_py_compiler(), "apply_functional", bound, grads, unpacked(), results);
    for (Kept& kept : kept_) saved.after(kept.tensor);
    return gradients;
  }

  void release_variables() override {
    const std::lock_guard lock(mutex_);
    for (Kept& kept : kept_) kept.tensor.reset_data();
  }

  std::string name() const override { return "FattnAttentionBackward"; }

 private:
  struct Kept {
    const char* name;
    bool is_output;  // of this node
    SavedVariable tensor;
  };

  void keep(const char* name, const Tensor& tensor, bool is_output) {
    kept_.push_back({name, is_output, SavedVariable(tensor, is_output)});
  }

  std::vector<c10::IValue> unpacked() {
    const auto self = c10::intrusive_ptr<Node>::reclaim_copy(this);
    std::vector<c10::IValue> tensors;
    for (const Kept& kept : kept_) {
      tensors.emplace_back(kept.tensor.unpack(kept.is_output ? self : c10::intrusive_ptr<Node>()));
    }
    return tensors;
  }

  BackwardInvocation backward_call() const {
    BackwardInvocation call{&backward_, numbers_, {}, {}};
    for (const Kept& kept : kept_) call.names.push_back(kept.name);
    for (size_t i = 0; i < call.needed.size(); ++i) call.needed[i] = task_should_compute_output(i);
    return call;
  }

  const c10::OperatorHandle& backward_;
  std::vector<std::pair<const char*, c10::IValue>> numbers_;
  std::vector<Kept> kept_;
};

// Refuses operands that are not differentiable here: in the backward it would be too late to choose another
// operator.
void check_differentiable(const c10::OperatorHandle& op, const Arguments& arguments) {
  if (arguments.has("attn_mask")) {
    const auto mask = arguments.optional_tensor("attn_mask");
    TORCH_CHECK_NOT_IMPLEMENTED(
        !mask || !mask->requires_grad(), public_name(op),
        ": attn_mask requires grad, and a mask has no gradient here; pass attn_mask.detach(), or use "
        "torch.nn.functional.scaled_dot_product_attention");
  }
  for (const char* name : {"query", "value"}) {
    const Tensor& operand = arguments.tensor(name);
    TORCH_CHECK_NOT_IMPLEMENTED(
        operand.dim() == 0 || operand.sym_size(-1) <= kMaxBackwardHeadDim, public_name(op), ": ", name,
        " has head_dim ", operand.sym_size(-1), ", and gradients are built for at most ", kMaxBackwardHeadDim,
        "; use torch.nn.functional.scaled_dot_product_attention where gradients are needed");
  }
}

// `op`: a forward, or its overload with_remainder, which the outer of two levels of torch.func receives.
template <const char* const& backward_name>
void run_with_gradient(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  static const c10::OperatorHandle backward =
      c10::Dispatcher::singleton().findSchemaOrThrow(backward_name, "");
  static const c10::OperatorHandle with_remainder =
      c10::Dispatcher::singleton().findSchemaOrThrow(op.schema().name().c_str(), "with_remainder");
  refuse_tangents(op, *stack);
  const bool needed = !inputs_that_require_grad(*stack, op.schema().arguments().size()).empty();
  bool keeps_remainder = false;  // the kernels write it; others do not read a saved result
  c10::intrusive_ptr<AttentionBackward> node;
  if (needed) {
    const Arguments arguments(op, *stack);
    check_differentiable(op, arguments);
    variable_list inputs;
    for (const char* name : kDifferentiable) {
      inputs.push_back(arguments.optional_tensor(name).value_or(Tensor()));
    }
    node = c10::make_intrusive<AttentionBackward>(backward, op, *stack, inputs);
    const Tensor& query = arguments.tensor("query");
    keeps_remainder = query.device().is_mps() && query.element_size() == 2;
  }
  {
    at::AutoDispatchBelowAutograd below_autograd;
    const c10::OperatorHandle& forward = keeps_remainder ? with_remainder : op;
    forward.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
  }
  if (!needed) return;
  const size_t returned = op.schema().returns().size();
  const auto results = torch::jit::last(*stack, keeps_remainder ? 3 : returned);
  const Tensor &out = results[0].toTensor(), &lse = results[1].toTensor();
  torch::autograd::set_history(out, node);
  torch::autograd::set_history(lse, node);
  node->keep_results(out, lse, keeps_remainder ? &results[2].toTensor() : nullptr);
  torch::jit::drop(*stack, results.size() - returned);
}

constexpr const char* kPrefillBackward = "fattn::prefill_backward";
constexpr const char* kVarlenPrefillBackward = "fattn::varlen_prefill_backward";

}  // namespace

TORCH_LIBRARY_IMPL(fattn, Autograd, library) {
  for (const char* overload : {"", ".with_remainder"}) {
    library.impl((std::string("attention") + overload).c_str(), boxed<run_with_gradient<kPrefillBackward>>());
    library.impl((std::string("varlen_attention") + overload).c_str(),
                 boxed<run_with_gradient<kVarlenPrefillBackward>>());
  }
}

}  // namespace fattn
