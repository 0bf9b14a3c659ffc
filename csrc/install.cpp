// Puts kernels of ours into torch's own attention ops on MPS, and takes them out again: torch then dispatches
// plain calls of F.scaled_dot_product_attention to them.
#include <memory>
#include <mutex>
#include <optional>

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include "install.h"
#include "sdpa.h"

namespace fattn {
namespace {

using at::Tensor;
using Kernel = c10::SafeKernelFunction;

constexpr const char* kSdpa = "aten::scaled_dot_product_attention";

// What torch would have called: on a Mac its composite implementation, for both keys.
struct Installed {
  Kernel mps;
  Kernel autograd;
};

std::mutex mutex;
std::shared_ptr<const Installed>& before_us() {
  static auto& kernels = *new std::shared_ptr<const Installed>;
  return kernels;
}

const c10::OperatorHandle& sdpa_op() {
  static const c10::OperatorHandle op = c10::Dispatcher::singleton().findSchemaOrThrow(kSdpa, "");
  return op;
}

Tensor run_torchs(c10::DispatchKeySet keys, const SdpaCall& call, Autograd autograd) {
  std::shared_ptr<const Installed> kernels;
  {
    const std::lock_guard lock(mutex);
    kernels = before_us();  // a call that is still running while another thread uninstalls keeps its own
  }
  torch::jit::Stack stack{call.query,     call.key,       call.value, call.attn_mask,
                          call.dropout_p, call.is_causal, call.scale, call.enable_gqa};
  const Kernel& kernel = autograd == Autograd::kHere ? kernels->autograd : kernels->mps;
  kernel.callBoxed(sdpa_op(), keys, &stack);
  return stack.back().toTensor();
}

template <Autograd autograd>
Tensor sdpa_kernel(c10::DispatchKeySet keys, const Tensor& query, const Tensor& key, const Tensor& value,
                   const std::optional<Tensor>& attn_mask, double dropout_p, bool is_causal,
                   std::optional<double> scale, bool enable_gqa) {
  const SdpaCall call{query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa};
  Reason reason = Reason::kNone;
  if (!NextSdpaIsTorchs::consume()) {
    if (auto out = routed_sdpa(call, autograd, reason)) return *out;
  }
  return run_torchs(keys, call, autograd);
}

// torch warns of a kernel in another's place. Ours calls the other one for what it does not do itself.
class Silence : public c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

struct Registrations {
  torch::Library mps{torch::Library::IMPL, "aten", c10::DispatchKey::MPS, __FILE__, __LINE__};
  torch::Library autograd{torch::Library::IMPL, "aten", c10::DispatchKey::AutogradMPS, __FILE__, __LINE__};
};

std::unique_ptr<Registrations>& registrations() {
  static auto& all = *new std::unique_ptr<Registrations>;
  return all;
}

bool is_installed() {
  const std::lock_guard lock(mutex);
  return registrations() != nullptr;
}

void install() {
  const std::lock_guard lock(mutex);
  if (registrations()) return;
  before_us() = std::make_shared<const Installed>(
      Installed{sdpa_op().getComputedKernelForDispatchKey(c10::DispatchKey::MPS),
                sdpa_op().getComputedKernelForDispatchKey(c10::DispatchKey::AutogradMPS)});
  auto added = std::make_unique<Registrations>();
  Silence silence;
  const c10::WarningUtils::WarningHandlerGuard silent(&silence);
  added->mps.impl(kSdpa, sdpa_kernel<Autograd::kAbove>);
  added->autograd.impl(kSdpa, sdpa_kernel<Autograd::kHere>);
  install_varlen_attn(added->mps);
  registrations() = std::move(added);
}

void uninstall() {
  const std::lock_guard lock(mutex);
  registrations().reset();
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(fattn, library) {
  library.def("_install() -> ()", install);
  library.def("_uninstall() -> ()", uninstall);
  library.def("_is_installed() -> bool", is_installed);
}

}  // namespace fattn
