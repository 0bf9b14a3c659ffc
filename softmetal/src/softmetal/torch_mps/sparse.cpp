// Sparse COO tensors on mps: creation, copies and conversions, as on a Mac, but no arithmetic.
#include <ATen/Functions.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

namespace softmetal {
namespace {

using at::Tensor;

// torch's kernel for CPU tensors also serves mps: it only calls ops on the indices and the values.
template <c10::DispatchKey key>
void run_shared(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  op.redispatchBoxed(c10::DispatchKeySet(key), stack);
}

// A Mac has a Metal kernel for this.
Tensor coalesce(const Tensor& self) { return at::_coalesce(self.cpu()).to(self.device()); }

Tensor to_dense(const Tensor& self, std::optional<at::ScalarType> type, std::optional<bool> masked_grad) {
  return self.cpu().to_dense(type, masked_grad).to(self.device());
}

TORCH_LIBRARY_IMPL(aten, SparseMPS, m) {
  for (const char* shared : {"empty.memory_format",
                             "empty_like",
                             "_sparse_coo_tensor_with_dims",
                             "_sparse_coo_tensor_with_dims_and_tensors",
                             "sparse_resize_",
                             "sparse_resize_and_clear_",
                             "zero_",
                             "clone",
                             "copy_",
                             "copy_sparse_to_sparse_",
                             "_to_sparse",
                             "_to_sparse.sparse_dim",
                             "sparse_dim",
                             "dense_dim",
                             "_nnz",
                             "is_coalesced",
                             "_coalesced_",
                             "_indices",
                             "_values",
                             "indices",
                             "values"})
    m.impl(shared, torch::CppFunction::makeFromBoxedFunction<&run_shared<c10::DispatchKey::SparseCPU>>());
  m.impl("_coalesce", coalesce);
  m.impl("_to_dense", to_dense);
}

TORCH_LIBRARY_IMPL(aten, MPS, m) {
  for (const char* shared : {"_to_sparse", "_to_sparse.sparse_dim"})
    m.impl(shared, torch::CppFunction::makeFromBoxedFunction<&run_shared<c10::DispatchKey::CPU>>());
}

}  // namespace
}  // namespace softmetal
