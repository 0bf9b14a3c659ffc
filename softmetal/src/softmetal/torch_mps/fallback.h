// Ops without a kernel for mps run on the CPU, on the same bytes: nothing is copied.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/stack.h>
#include <c10/util/SmallVector.h>

namespace softmetal {

// CPU tensors over the bytes of mps tensors, for the duration of one op. Tensors of one storage share one CPU
// storage.
class HostView {
 public:
  HostView();                                 // waits for the stream
  at::Tensor host(const at::Tensor& tensor);  // itself, if it is not an mps tensor
  // Returns the mps tensor for an op's result: over the same storage if the result is a view of an argument,
  // else over new memory.
  at::Tensor device(const at::Tensor& result);
  // Applies the op's changes of an argument's storage size, sizes and strides.
  void update(const at::Tensor& argument, const at::Tensor& host);

 private:
  struct Pair {
    c10::Storage device, host;
    void* bytes;  // the bytes of `device` when the pair was made
  };
  c10::SmallVector<Pair, 4> pairs_;
};

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack);

void check_dtype(at::ScalarType type);  // TypeError for a dtype without a Metal type

}  // namespace softmetal
