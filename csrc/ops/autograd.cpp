// Refuses gradients of the ops outside differentiable.cpp. Their results belong to the graph, so that a
// backward through them raises; without an autograd kernel, torch would leave gradients None with a warning.
// Ops that write refuse to write tensors of a graph.
#include "autograd.h"

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/zeros.h>
#include <c10/core/AutogradState.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>
#include <torch/library.h>

#include "../plan/problem.h"

namespace fattn {
namespace {

using at::Tensor;
using torch::autograd::variable_list;

// A refusal is a separate op with a fake kernel: torch.compile traces every backward ahead of time, and that
// must not raise before a gradient is needed.
constexpr const char* kNoBackward = "fattn::_refuse_backward";
constexpr const char* kNoSecondDerivative = "fattn::_refuse_second_derivative";  // of a backward

class RefuseBackward : public torch::autograd::Node {
 public:
  RefuseBackward(const char* refusal, std::string op, const variable_list& inputs)
      : Node(torch::autograd::collect_next_edges(inputs)), refusal_(refusal), op_(std::move(op)) {
    for (const Tensor& input : inputs) {
      const c10::SymIntArrayRef sizes = input.sym_sizes();
      input_sizes_.emplace_back(sizes.begin(), sizes.end());
    }
  }

  variable_list apply(variable_list&& grads) override {
    const auto grad = std::find_if(grads.begin(), grads.end(), [](const Tensor& g) { return g.defined(); });
    const Tensor refused = refuse(*grad).sum();
    variable_list input_grads;
    for (const auto& sizes : input_sizes_) input_grads.push_back(refused.expand_symint(sizes));
    return input_grads;
  }

  // Compiled autograd calls this when a backward is about to run.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override { refuse(at::zeros({})); }

  std::string name() const override { return "FattnRefuseBackward"; }

 private:
  Tensor refuse(const Tensor& grad) const {
    const auto refusal = c10::Dispatcher::singleton()
                             .findSchemaOrThrow(refusal_, "")
                             .typed<Tensor(const Tensor&, std::string_view)>();
    return refusal.call(grad, op_);
  }

  const char* refusal_;
  std::string op_;
  std::vector<std::vector<c10::SymInt>> input_sizes_;
};

}  // namespace

std::string public_name(const c10::OperatorHandle& op) {
  std::string name = op.schema().name();
  return name.replace(name.find("::"), 2, ".");
}

void refuse_tangents(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  if (!c10::AutogradState::get_tls_state().get_fw_grad_mode()) return;
  const auto& arguments = op.schema().arguments();
  const auto values = torch::jit::last(stack, arguments.size());
  for (size_t i = 0; i < arguments.size(); ++i) {
    const bool has_tangent = values[i].isTensor() && values[i].toTensor()._fw_grad(/*level=*/0).defined();
    TORCH_CHECK_NOT_IMPLEMENTED(!has_tangent, public_name(op), ": ", arguments[i].name(),
                                " has a forward-mode tangent and there is no derivative; use torch's own "
                                "operators where one is needed");
  }
}

variable_list inputs_that_require_grad(const torch::jit::Stack& stack, size_t argument_count) {
  variable_list inputs;
  if (!at::GradMode::is_enabled()) return inputs;
  for (const c10::IValue& argument : torch::jit::last(stack, argument_count)) {
    if (argument.isTensor() && argument.toTensor().requires_grad()) inputs.push_back(argument.toTensor());
  }
  return inputs;
}

namespace {

// Calls `function` for each operand that the schema marks as written.
template <typename Function>
void for_each_written(const c10::OperatorHandle& op, const torch::jit::Stack& stack, Function function) {
  const auto& arguments = op.schema().arguments();
  const auto values = torch::jit::last(stack, arguments.size());
  for (size_t i = 0; i < arguments.size(); ++i) {
    const c10::AliasInfo* alias = arguments[i].alias_info();
    if (alias != nullptr && alias->isWrite() && values[i].isTensor()) {
      function(arguments[i].name(), values[i].toTensor());
    }
  }
}

// Written tensors must not be part of a graph.
void refuse_written_in_graph(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  for_each_written(op, stack, [&](const std::string& name, const Tensor& written) {
    TORCH_CHECK(!(at::GradMode::is_enabled() && written.requires_grad()), public_name(op), ": ", name,
                " requires grad, and caches do not support gradients; pass ", name,
                ".detach(), or call under torch.no_grad()");
  });
}

// The autograd kernel of an op, whatever its signature.
template <const char* const& refusal>
void run_without_gradient(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  refuse_tangents(op, *stack);
  refuse_written_in_graph(op, *stack);
  const variable_list inputs = inputs_that_require_grad(*stack, op.schema().arguments().size());
  {
    at::AutoDispatchBelowAutograd below_autograd;
    op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
  }
  if (inputs.empty()) return;
  const c10::intrusive_ptr<torch::autograd::Node> node =
      c10::make_intrusive<RefuseBackward>(refusal, public_name(op), inputs);
  for (const c10::IValue& result : torch::jit::last(*stack, op.schema().returns().size())) {
    torch::autograd::set_history(result.toTensor(), node);
  }
}

void refuse_inference_tensors(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  for_each_written(op, stack, [&](const std::string& name, const Tensor& written) {
    TORCH_CHECK(!written.is_inference(), public_name(op), ": ", name,
                " is an inference tensor, which can be written in inference mode only; call under "
                "torch.inference_mode(), or allocate it outside of the mode");
  });
}

// The autograd kernel of an op that only writes. The rows may require a gradient but receive none.
void write_without_gradient(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                            torch::jit::Stack* stack) {
  refuse_written_in_graph(op, *stack);
  at::AutoDispatchBelowAutograd below_autograd;
  op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
}

// Bumps the versions of the written tensors, so that a backward that saved one raises. Inference tensors have
// none. In inference mode this runs if an operand is not one, such as a weight.
void bump_versions(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  if (!c10::InferenceMode::is_enabled()) refuse_inference_tensors(op, *stack);
  std::vector<Tensor> written;
  for_each_written(op, *stack, [&](const std::string&, const Tensor& tensor) {
    if (!tensor.is_inference()) written.push_back(tensor);
  });
  {
    at::AutoDispatchBelowADInplaceOrView below;
    op.redispatchBoxed(keys & c10::after_ADInplaceOrView_keyset, stack);
  }
  for (const Tensor& tensor : written) torch::autograd::impl::bump_version(tensor);
}

// Writing a lazily negated view (.imag of a conjugate) would write a copy.
void refuse_negated(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  for_each_written(op, *stack, [&](const std::string& name, const Tensor& written) {
    TORCH_CHECK_VALUE(!written.is_neg(), public_name(op), ": ", name,
                      " is a negated view and is written in place; pass the result of its .resolve_neg()");
  });
  const size_t count = op.schema().arguments().size();
  for (size_t i = 0; i < count; ++i) {
    c10::IValue& argument = torch::jit::peek(*stack, i, count);
    if (argument.isTensor()) argument = argument.toTensor().resolve_neg();
  }
  op.callBoxed(stack);
}

}  // namespace

#define FATTN_NAME(op, name) , #name
TORCH_LIBRARY_IMPL(fattn, ADInplaceOrView, library) {
  for (const char* name : {"cache_write", "rotary_write" FATTN_DELTA_OPS(FATTN_NAME)}) {
    library.impl(name, boxed<bump_versions>());
  }
}

TORCH_LIBRARY_IMPL(fattn, Negative, library) {
  for (const char* name : {"cache_write", "rotary_write" FATTN_DELTA_OPS(FATTN_NAME)}) {
    library.impl(name, boxed<refuse_negated>());
  }
}

#undef FATTN_NAME

TORCH_LIBRARY_IMPL(fattn, Autograd, library) {
  library.impl("cache_write", boxed<write_without_gradient>());
#define FATTN_NAME(op, name, ...) #name,
#define FATTN_NAMES(op, name, ...) #name, #name ".part",
  for (const char* name : {FATTN_ATTENTION_OPS(FATTN_NAMES) FATTN_LOGITS_OPS(FATTN_NAME)
                               FATTN_ROTARY_OPS(FATTN_NAME) FATTN_DELTA_OPS(FATTN_NAME) "rms_norm",
                           "merge", "merge.parts"}) {
    library.impl(name, boxed<run_without_gradient<kNoBackward>>());
  }
  for (const char* name : {FATTN_BACKWARD_OPS(FATTN_NAME)}) {
    library.impl(name, boxed<run_without_gradient<kNoSecondDerivative>>());
  }
#undef FATTN_NAME
#undef FATTN_NAMES
  library.impl("mask_map", torch::CppFunction::makeFallthrough());  // bytes belong to no graph
}

}  // namespace fattn
