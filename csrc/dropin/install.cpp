// Registers our kernels for torch's own attention ops on MPS, and turns them on and off. When on, torch
// dispatches plain calls of F.scaled_dot_product_attention to them; when off they call torch's kernels.
#include <atomic>
#include <memory>
#include <mutex>
#include <optional>

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include "../ops/torch_errors.h"
#include "install.h"
#include "sdpa.h"

namespace fattn {
namespace {

using at::Tensor;
using Kernel = c10::SafeKernelFunction;

constexpr const char* kSdpa = "aten::scaled_dot_product_attention";

// The kernels that ours replaced. `composite` is torch's own implementation, and so are the others unless
// another library registered `mps` or `autograd`.
struct Before {
  Kernel mps;
  Kernel autograd;
  Kernel composite;
  mutable std::atomic<bool> mps_is_gone{false}, autograd_is_gone{false};
};

std::mutex mutex;
// torch reads its table of kernels without a lock: registering or removing a kernel while another thread
// calls the op crashes that thread. Ours are registered once and stay; install() and uninstall() set this
// flag.
std::atomic<bool> is_on{false};
std::unique_ptr<const Before>& before_us() {
  static auto& kernels = *new std::unique_ptr<const Before>;
  return kernels;
}

const c10::OperatorHandle& sdpa_op() {
  static const c10::OperatorHandle op = c10::Dispatcher::singleton().findSchemaOrThrow(kSdpa, "");
  return op;
}

Tensor run_kernel(const Kernel& kernel, c10::DispatchKeySet keys, const SdpaCall& call) {
  torch::jit::Stack stack{call.query,     call.key,       call.value, call.attn_mask,
                          call.dropout_p, call.is_causal, call.scale, call.enable_gqa};
  kernel.callBoxed(sdpa_op(), keys, &stack);
  return stack.back().toTensor();
}

Tensor run_torchs(c10::DispatchKeySet keys, const SdpaCall& call, Autograd autograd) {
  const Before& before = *before_us();
  const bool is_here = autograd == Autograd::kHere;
  std::atomic<bool>& is_gone = is_here ? before.autograd_is_gone : before.mps_is_gone;
  // If another library has a kernel below autograd only, torch's autograd kernel calls ours there.
  const NextSdpaGoesToTorch decided;
  if (!is_gone) {
    try {
      return run_kernel(is_here ? before.autograd : before.mps, keys, call);
    } catch (const c10::Error& error) {  // raised before anything has run
      if (torch_error_of(error) != TorchError::kKernelGone) throw;
      is_gone = true;
    }
  }
  return run_kernel(before.composite, keys, call);
}

template <Autograd autograd>
Tensor sdpa_kernel(c10::DispatchKeySet keys, const Tensor& query, const Tensor& key, const Tensor& value,
                   const std::optional<Tensor>& attn_mask, double dropout_p, bool is_causal,
                   std::optional<double> scale, bool enable_gqa) {
  const SdpaCall call{query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa};
  Reason reason = Reason::kNone;
  const bool is_decided = NextSdpaGoesToTorch::consume();
  if (is_on && !is_decided) {
    if (auto out = routed_sdpa(call, autograd, reason)) return *out;
  }
  return run_torchs(keys, call, autograd);
}

// torch warns when a kernel replaces another. Ours forwards the calls that it does not take.
class Silence : public c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

// Registers the kernel above autograd first: with only the one below, autograd would miss the call.
void register_kernels() {
  const auto kernel_of = [](c10::DispatchKey key) { return sdpa_op().getComputedKernelForDispatchKey(key); };
  before_us().reset(new Before{kernel_of(c10::DispatchKey::MPS), kernel_of(c10::DispatchKey::AutogradMPS),
                               kernel_of(c10::DispatchKey::Undefined)});
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
