// The boxed fallback: runs the CPU kernel of any op on mps tensors.
#include "fallback.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include "allocator.h"
#include "generator.h"
#include "stream.h"

namespace softmetal {
namespace {

using at::Tensor;

void release_storage(void* storage) {
  c10::raw::intrusive_ptr::decref(static_cast<c10::StorageImpl*>(storage));
}

c10::Storage alias_storage(const c10::Storage& device) {
  void* owner = c10::Storage(device).unsafeReleaseStorageImpl();
  c10::DataPtr data(host_bytes(*device.unsafeGetStorageImpl()), owner, &release_storage,
                    c10::Device(at::kCPU));
  return c10::Storage(c10::Storage::use_byte_size_t(), device.nbytes(), std::move(data),
                      c10::GetAllocator(at::kCPU), /*resizable=*/true);
}

Tensor make_tensor(c10::Storage storage, c10::DispatchKey key, const Tensor& like) {
  Tensor tensor =
      at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_offset(like.storage_offset());
  impl->set_sizes_and_strides(like.sizes(), like.strides());
  return tensor;
}

// An argument that the op writes, and its CPU tensor.
struct Written {
  size_t argument;
  Tensor device, host;
};

class Call {
 public:
  Call(const c10::FunctionSchema& schema, torch::jit::Stack* stack) : schema_(schema), stack_(stack) {}

  void replace_arguments() {
    size_t count = schema_.arguments().size();
    for (size_t i = 0; i < count; ++i) replace(i, (*stack_)[stack_->size() - count + i]);
    TORCH_CHECK(!(any_mps_ && any_cpu_) || takes_cpu_lengths(),
                "Expected all tensors to be on the same device, but found at ",
                "least two devices, mps:0 and cpu! (when running ", schema_.name(), ")");
  }

  void replace_results() {
    for (const Written& written : written_) view_.update(written.device, written.host);
    size_t count = schema_.returns().size();
    for (size_t i = 0; i < count; ++i) replace_result(i, (*stack_)[stack_->size() - count + i]);
  }

 private:
  void replace(size_t i, c10::IValue& value) {
    const c10::Argument& argument = schema_.arguments()[i];
    if (value.isTensor()) {
      const Tensor& device = value.toTensor();
      if (!device.defined()) return;
      Tensor host = host_of(device);
      if (argument.alias_info() && argument.alias_info()->isWrite()) written_.push_back({i, device, host});
      value = std::move(host);
    } else if (value.isTensorList()) {
      value = hosts_of(value.toTensorList());
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> hosts;
      for (std::optional<Tensor> tensor : value.toOptionalTensorList())
        hosts.push_back(tensor && tensor->defined() ? std::optional<Tensor>(view_.host(*tensor)) : tensor);
      value = std::move(hosts);
    } else if (value.isDevice()) {
      if (value.toDevice().is_mps()) value = c10::Device(at::kCPU);
    } else if (value.isGenerator()) {
      value = host_generator(value.toGenerator());
    } else if (value.isNone() && wants_generator(argument)) {
      value = host_generator(default_generator());
    }
  }

  // Checks devices: a CPU tensor among mps tensors is an error, unless it is a scalar or (in lists of
  // optional tensors) an index.
  Tensor host_of(const Tensor& tensor) {
    if (tensor.is_mps())
      any_mps_ = true;
    else if (tensor.dim() > 0)
      any_cpu_ = true;
    return view_.host(tensor);
  }

  bool takes_cpu_lengths() const {  // by the ops' own contract
    return schema_.name() == "aten::_pack_padded_sequence" || schema_.name() == "aten::_ctc_loss";
  }

  c10::List<Tensor> hosts_of(const c10::List<Tensor>& devices) {
    c10::List<Tensor> hosts;
    hosts.reserve(devices.size());
    for (const Tensor& tensor : devices) hosts.push_back(tensor.defined() ? host_of(tensor) : tensor);
    return hosts;
  }

  static bool wants_generator(const c10::Argument& argument) {
    auto optional = argument.type()->cast<c10::OptionalType>();
    return optional && optional->getElementType()->kind() == c10::TypeKind::GeneratorType;
  }

  void replace_result(size_t i, c10::IValue& value) {
    const c10::AliasInfo* alias = schema_.returns()[i].alias_info();
    if (alias && alias->isWrite()) {
      for (const Written& written : written_)
        if (*schema_.arguments()[written.argument].alias_info() == *alias) value = written.device;
    } else if (value.isTensor()) {
      value = view_.device(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<Tensor> devices;
      for (const Tensor& tensor : value.toTensorList()) devices.push_back(view_.device(tensor));
      value = std::move(devices);
    }
  }

  const c10::FunctionSchema& schema_;
  torch::jit::Stack* stack_;
  HostView view_;
  c10::SmallVector<Written, 2> written_;
  bool any_mps_ = false, any_cpu_ = false;
};

}  // namespace

void check_dtype(at::ScalarType type) {
  TORCH_CHECK_TYPE(
      type != at::kDouble && type != at::kComplexDouble,
      "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64. Please use "
      "float32 instead.");
}

HostView::HostView() { finish_streams(); }

Tensor HostView::host(const Tensor& tensor) {
  if (!tensor.is_mps()) return tensor;
  const c10::Storage& device = tensor.storage();
  const Pair* pair = nullptr;
  for (const Pair& known : pairs_)
    if (known.device.unsafeGetStorageImpl() == device.unsafeGetStorageImpl()) pair = &known;
  if (!pair) {
    pairs_.push_back({device, alias_storage(device), host_bytes(*device.unsafeGetStorageImpl())});
    pair = &pairs_.back();
  }
  Tensor host = make_tensor(pair->host, c10::DispatchKey::CPU, tensor);
  if (tensor.is_conj()) host._set_conj(true);
  if (tensor.is_neg()) host._set_neg(true);
  return host;
}

Tensor HostView::device(const Tensor& result) {
  if (!result.defined() || result.is_mps()) return result;
  TORCH_CHECK_NOT_IMPLEMENTED(result.layout() == at::kStrided,
                              "softmetal's mps device has strided and sparse COO tensors only, not ",
                              result.layout());
  check_dtype(result.scalar_type());
  const c10::Storage& host = result.storage();
  for (const Pair& known : pairs_)
    if (known.host.unsafeGetStorageImpl() == host.unsafeGetStorageImpl())
      return make_tensor(known.device, c10::DispatchKey::MPS, result);
  c10::Storage device = make_storage(wrap_host_storage(host), host.nbytes());
  pairs_.push_back({device, host, nullptr});
  return make_tensor(device, c10::DispatchKey::MPS, result);
}

void HostView::update(const Tensor& argument, const Tensor& host) {
  if (!argument.is_mps()) return;
  for (Pair& pair : pairs_) {
    if (pair.device.unsafeGetStorageImpl() != argument.storage().unsafeGetStorageImpl()) continue;
    if (pair.host.data() != pair.bytes) {
      pair.device.set_data_ptr_noswap(wrap_host_storage(pair.host));
      pair.device.set_nbytes(pair.host.nbytes());
      pair.bytes = pair.host.mutable_data();
    }
  }
  c10::TensorImpl* impl = argument.unsafeGetTensorImpl();
  if (argument.sizes() == host.sizes() && argument.strides() == host.strides() &&
      argument.storage_offset() == host.storage_offset())
    return;
  impl->set_storage_offset(host.storage_offset());
  impl->set_sizes_and_strides(host.sizes(), host.strides());
}

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Call call(op.schema(), stack);
  call.replace_arguments();
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  call.replace_results();
}

}  // namespace softmetal
