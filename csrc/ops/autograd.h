// Shared by the boxed kernels.
#pragma once

#include <string>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>

namespace fattn {

template <auto kernel>
torch::CppFunction boxed() {
  return torch::CppFunction::makeFromBoxedFunction<kernel>();
}

// "fattn.prefill" for "fattn::prefill".
std::string public_name(const c10::OperatorHandle& op);

// Raises for an argument with a forward-mode tangent: a result without one would mean a derivative of 0.
void refuse_tangents(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

// The arguments that require a gradient, if gradients are enabled.
torch::autograd::variable_list inputs_that_require_grad(const torch::jit::Stack& stack,
                                                        size_t argument_count);

}  // namespace fattn
