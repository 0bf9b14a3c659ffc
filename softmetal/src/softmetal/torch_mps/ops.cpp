// The ops that mps implements itself: memory, copies, views, and a few that torch's composites would dispatch
// elsewhere. All other ops use the fallback.
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/_scaled_dot_product_attention_math.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/item.h>
#include <ATen/ops/scaled_dot_product_attention_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include "allocator.h"
#include "fallback.h"

namespace softmetal {
namespace {

using at::Tensor;
using c10::SymInt;
using c10::SymIntArrayRef;
using std::optional;

constexpr c10::DispatchKeySet kMps(c10::DispatchKey::MPS);

// ---- memory

Tensor empty(at::IntArrayRef size, optional<at::ScalarType> type, optional<at::Layout>, optional<at::Device>,
             optional<bool>, optional<at::MemoryFormat> format) {
  at::ScalarType dtype = c10::dtype_or_default(type);
  check_dtype(dtype);
  return at::detail::empty_generic(size, allocator(), kMps, dtype, format);
}

Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, optional<at::ScalarType> type,
                     optional<at::Layout>, optional<at::Device>, optional<bool>) {
  at::ScalarType dtype = c10::dtype_or_default(type);
  check_dtype(dtype);
  return at::detail::empty_strided_generic(size, stride, allocator(), kMps, dtype);
}

// A tensor of zeros without memory, which autograd makes; torch materialises it when its values are needed.
Tensor zero_tensor(at::IntArrayRef size, optional<at::ScalarType> type, optional<at::Layout>,
                   optional<at::Device>, optional<bool>) {
  at::native::ZeroTensorAllocator no_memory(at::Device(at::kMPS, 0));
  constexpr c10::DispatchKeySet keys = kMps | c10::DispatchKeySet(c10::DispatchKey::ZeroTensor);
  return at::detail::empty_generic(size, &no_memory, keys, c10::dtype_or_default(type), std::nullopt);
}

Tensor& copy_(Tensor& self, const Tensor& source, bool) {
  at::AutoDispatchBelowADInplaceOrView guard;
  HostView view;
  view.host(self).copy_(view.host(source));
  return self;
}

Tensor copy_from(const Tensor& source, const Tensor& destination, bool non_blocking) {
  Tensor out = destination;
  return copy_(out, source, non_blocking);
}

at::Scalar local_scalar_dense(const Tensor& self) {
  HostView view;
  return view.host(self).item();
}

Tensor& set_storage_offset(Tensor& self, at::Storage storage, SymInt offset, SymIntArrayRef size,
                           SymIntArrayRef stride) {
  c10::TensorImpl* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset.expect_int());
  auto sizes = C10_AS_INTARRAYREF_SLOW(size), strides = C10_AS_INTARRAYREF_SLOW(stride);
  if (strides.size() == sizes.size())
    impl->set_sizes_and_strides(sizes, strides);
  else
    impl->set_sizes_contiguous(sizes);
  return self;
}
Tensor& set_storage(Tensor& self, at::Storage storage) {
  SymInt elements(int64_t(storage.nbytes() / self.dtype().itemsize()));
  return set_storage_offset(self, std::move(storage), 0, {elements}, {});
}
Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage_offset(self, source.storage(), source.storage_offset(), source.sym_sizes(),
                            source.sym_strides());
}
Tensor& set_none(Tensor& self) {
  return set_storage_offset(self, make_storage(allocator()->allocate(0), 0), 0, {SymInt(0)}, {});
}

// ---- views

Tensor as_strided(const Tensor& self, SymIntArrayRef size, SymIntArrayRef stride, optional<SymInt> offset) {
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size),
                                           C10_AS_INTARRAYREF_SLOW(stride),
                                           offset ? optional<int64_t>(offset->expect_int()) : std::nullopt);
}
Tensor view(const Tensor& self, SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}
Tensor reshape_alias(const Tensor& self, SymIntArrayRef size, SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

// ---- scaled_dot_product_attention
// On a Mac this operator has no mps kernel: torch's composite serves every dispatch key. The composite in the
// Linux wheel looks up a table of fused kernels, which has no row for mps, and fails; this one replaces it.

Tensor scaled_dot_product_attention(const Tensor& q, const Tensor& k, const Tensor& v,
                                    const optional<Tensor>& mask, double dropout, bool causal,
                                    optional<double> scale, bool gqa) {
  if (!q.device().is_mps())
    return at::native::scaled_dot_product_attention(q, k, v, mask, dropout, causal, scale, gqa);
  optional<Tensor> bias = mask;
  if (mask && mask->defined() && mask->scalar_type() == at::kBool) {
    constexpr double kHidden = -std::numeric_limits<double>::infinity();
    bias = at::zeros_like(*mask, q.options()).masked_fill(mask->logical_not(), kHidden);
  }
  return std::get<0>(
      at::_scaled_dot_product_attention_math(q, k, v, bias, dropout, causal, std::nullopt, scale, gqa));
}

class Silence : public c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

void replace_scaled_dot_product_attention() {
  Silence silence;  // torch warns when a kernel replaces another
  const c10::WarningUtils::WarningHandlerGuard silent(&silence);
  for (const auto key :
       {c10::DispatchKey::CompositeImplicitAutograd, c10::DispatchKey::FuncTorchBatchedDecomposition,
        c10::DispatchKey::FuncTorchVmapMode}) {
    auto& library = *new torch::Library(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
    library.impl("scaled_dot_product_attention", scaled_dot_product_attention);
  }
}

// ---- registration

// Structured ops have a composite kernel that would allocate the result on mps and then call the out=
// variant. The CPU kernel does both at once, and its result is used without a copy.
void register_structured_ops() {
  static torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::MPS, __FILE__, __LINE__);
  c10::Dispatcher& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    auto op = dispatcher.findOp(name);
    if (!op || !op->hasKernelForDispatchKey(c10::DispatchKey::CPU) ||
        !op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutogradNonFunctional) ||
        op->hasKernelForDispatchKey(c10::DispatchKey::MPS))
      continue;
    library.impl(toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
  }
}

TORCH_LIBRARY_IMPL(_, MPS, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>()); }

TORCH_LIBRARY_IMPL(aten, MPS, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_efficientzerotensor", zero_tensor);
  m.impl("copy_", copy_);
  m.impl("_copy_from", copy_from);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("set_.source_Storage_storage_offset", set_storage_offset);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_none);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  // Composites that choose a backend by device type and have none for mps: they run on the CPU as a whole.
  for (const char* composite : {"convolution", "convolution_backward"})
    m.impl(composite, torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
  register_structured_ops();
  replace_scaled_dot_product_attention();
}

}  // namespace
}  // namespace softmetal
