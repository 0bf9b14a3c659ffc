// Puts kernels of ours into torch's own attention ops on MPS, and turns them on and off: torch then
// dispatches plain calls of F.scaled_dot_product_attention to them. Those that are off do what torch did.
#include <atomic>
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
struct Before {
  Kernel mps;
  Kernel autograd;
};

std::mutex mutex;
// torch reads its table of kernels without a lock, so that a kernel that comes or goes while another thread
// calls the op crashes that thread. Ours are registered once and stay; this is what install() turns.
std::atomic<bool> is_on{false};
std::unique_ptr<const Before>& before_us() {
  static auto& kernels = *new std::unique_ptr<const Before>;
  return kernels;
}

const c10::OperatorHandle& sdpa_op() {
  static const c10::OperatorHandle op = c10::Dispatcher::singleton().findSchemaOrThrow(kSdpa, "");
  return op;
}

Tensor run_torchs(c10::DispatchKeySet keys, const SdpaCall& call, Autograd autograd) {
  torch::jit::Stack stack{call.query,     call.key,       call.value, call.attn_mask,
                          call.dropout_p, call.is_causal, call.scale, call.enable_gqa};
  const Kernel& kernel = autograd == Autograd::kHere ? before_us()->autograd : before_us()->mps;
  kernel.callBoxed(sdpa_op(), keys, &stack);
  return stack.back().toTensor();
}

template <Autograd autograd>
Tensor sdpa_kernel(c10::DispatchKeySet keys, const Tensor& query, const Tensor& key, const Tensor& value,
                   const std::optional<Tensor>& attn_mask, double dropout_p, bool is_causal,
                   std::optional<double> scale, bool enable_gqa) {
  const SdpaCall call{query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa};
  Reason reason = Reason::kNone;
  const bool is_decided = NextSdpaIsTorchs::consume();
  if (is_on && !is_decided) {
    if (auto out = routed_sdpa(call, autograd, reason)) return *out;
  }
  return run_torchs(keys, call, autograd);
}

// torch warns of a kernel in another's place. Ours calls the other one for what it does not do itself.
class Silence : public c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

// The kernel above autograd first: with the one below it alone, autograd would no longer see the call.
void register_kernels() {
  before_us() = std::make_unique<const Before>(
      Before{sdpa_op().getComputedKernelForDispatchKey(c10::DispatchKey::MPS),
             sdpa_op().getComputedKernelForDispatchKey(c10::DispatchKey::AutogradMPS)});
  Silence silence;
  const c10::WarningUtils::WarningHandlerGuard silent(&silence);
  static auto& autograd =
      *new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::AutogradMPS, __FILE__, __LINE__);
  static auto& mps =
      *new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::MPS, __FILE__, __LINE__);
  autograd.impl(kSdpa, sdpa_kernel<Autograd::kHere>);
  mps.impl(kSdpa, sdpa_kernel<Autograd::kAbove>);
  register_varlen_attn(mps);
}

void install() {
  const std::lock_guard lock(mutex);
  if (!before_us()) register_kernels();
  is_on = true;
}

void uninstall() { is_on = false; }

}  // namespace

bool is_installed() { return is_on; }

TORCH_LIBRARY_FRAGMENT(fattn, library) {
  library.def("_install() -> ()", install);
  library.def("_uninstall() -> ()", uninstall);
  library.def("_is_installed() -> bool", is_installed);
}

}  // namespace fattn
