// torch_fattn.sdpa, and the routing that it shares with the kernels of install().
#include "sdpa.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <iomanip>
#include <sstream>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>

#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <c10/core/AutogradState.h>
#include <c10/core/SymInt.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/library.h>

#include "../ops/gpu.h"
#include "../selftest/verdicts.h"
#include "../ops/torch_errors.h"
#include "../plan/route.h"
#include "../plan/supported.h"
#include "../describe/arguments.h"
#include "../describe/tensor_checks.h"
#include "shapes.h"

namespace fattn {
namespace {

using at::Tensor;
using c10::SymInt;

thread_local bool next_goes_to_torch = false;
std::atomic<RoutePolicy> policy{RoutePolicy::kAuto};
std::atomic<TrainingPolicy> training{TrainingPolicy::kAuto};

// A tensor of a Python class. While torch.compile or export traces, every tensor has such a class, and the
// call becomes a node of the graph.
bool is_subclass(const Tensor& tensor) { return tensor.key_set().has(c10::DispatchKey::Python); }

bool is_traced() {
  using Modes = c10::impl::TorchDispatchModeTLS;
  using Mode = c10::impl::TorchDispatchModeKey;
  return Modes::get_mode(Mode::FAKE) || Modes::get_mode(Mode::PROXY) || Modes::get_mode(Mode::FUNCTIONAL);
}

bool in_transform(const Tensor& tensor) {
  constexpr c10::DispatchKeySet kTransforms = c10::DispatchKeySet(c10::DispatchKey::FuncTorchBatched) |
                                              c10::DispatchKeySet(c10::DispatchKey::FuncTorchGradWrapper) |
                                              c10::DispatchKeySet(c10::DispatchKey::BatchedNestedTensor);
  return tensor.key_set().has_any(kTransforms);
}

bool has_tangent(const Tensor& tensor) { return tensor._fw_grad(/*level=*/0).defined(); }

bool has_unknown_size(const Tensor& tensor) {
  if (!tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides()) return false;
  for (const SymInt& size : tensor.sym_sizes()) {
    if (size.is_heap_allocated() && !size.toSymNode()->has_hint()) return true;
  }
  return false;
}

template <typename Predicate>
bool any_operand(const SdpaCall& call, const Predicate& holds) {
  return holds(call.query) || holds(call.key) || holds(call.value) ||
         (call.attn_mask && call.attn_mask->defined() && holds(*call.attn_mask));
}

bool needs_gradient(const SdpaCall& call, Autograd autograd) {
  return autograd == Autograd::kHere && c10::GradMode::is_enabled() &&
         any_operand(call, [](const Tensor& t) { return t.requires_grad(); });
}

bool is_kernel_dtype(at::ScalarType type) {
  return type == at::kFloat || type == at::kHalf || type == at::kBFloat16;
}

// Whether our kernels support this head size, padded if necessary.
bool has_kernel_for(const SymInt& head_dim) { return head_dim > 0 && head_dim <= kMaxHeadDim; }
bool has_backward_for(const SymInt& head_dim) { return head_dim <= kMaxBackwardHeadDim; }

bool only_math_is_enabled() {
  const at::Context& context = at::globalContext();
  return !context.userEnabledFlashSDP() && !context.userEnabledMemEfficientSDP();
}

bool gpu_has_kernels() {
#ifdef FATTN_WITH_METAL
  return !check(gpu_facts(), Op::kPrefill);
#else
  return false;
#endif
}

DType plain(at::ScalarType type) {
  return type == at::kFloat      ? DType::kFloat32
         : type == at::kHalf     ? DType::kFloat16
         : type == at::kBFloat16 ? DType::kBFloat16
         : type == at::kBool     ? DType::kBool
                                 : DType::kOther;
}

int64_t known(const SymInt& size, int64_t otherwise) { return size.maybe_as_int().value_or(otherwise); }

// A symbolic length counts as long: the route must not add a guard to the graph.
PlainCall plain(const SdpaCall& call) {
  constexpr int64_t kLong = 1 << 20;
  const Sizes sizes = *sizes_of(call);
  PlainCall described;
  described.dtype = plain(call.query.scalar_type());
  if (call.attn_mask) described.mask_dtype = plain(call.attn_mask->scalar_type());
  described.batch = known(sizes.batch, 1);
  described.q_heads = known(sizes.q_heads, 1);
  described.q_len = known(size_of(call.query, 2), kLong);
  described.kv_len = known(size_of(call.key, 2), kLong);
  described.head_dim = known(size_of(call.query, 3), 0);
  described.value_dim = known(size_of(call.value, 3), 0);
  described.is_causal = call.is_causal;
  return described;
}

// The size whose pending self-test determines the route of this call, if any.
std::optional<UnitsSize> deciding_size(const PlainCall& call, const DeviceFacts& facts) {
  const auto size = units_size(call.dtype, call.head_dim, call.value_dim);
  if (!size || facts.units.of(*size) != UnitsState::kUntested) return std::nullopt;
  DeviceFacts passed = facts;
  passed.units.set(*size, UnitsState::kRegisters);
  const bool decides = route_of(call, facts, policy).to_torch && !route_of(call, passed, policy).to_torch;
  return decides ? size : std::nullopt;
}

// Runs the self-test if the route depends on it. A traced call runs here instead: the operator then runs the
// test when the graph first runs.
bool torch_is_faster(const SdpaCall& call, const DeviceFacts& facts) {
  const PlainCall described = plain(call);
#ifdef FATTN_WITH_METAL
  if (const auto size = deciding_size(described, facts)) {
    if (is_traced() || any_operand(call, is_subclass)) return false;
    test_size(*size, facts);
    return route_of(described, gpu_facts(), policy).to_torch;
  }
#endif
  return route_of(described, facts, policy).to_torch;
}

// The order matters: each check relies on the earlier ones.
Reason why_not(const SdpaCall& call, Autograd autograd) {
  const auto &q = call.query, &k = call.key, &v = call.value;
  if (any_operand(call, [](const Tensor& t) { return t.is_nested(); })) return Reason::kNested;
  if (any_operand(call, [](const Tensor& t) { return t.layout() != at::kStrided; })) return Reason::kLayout;
  if (any_operand(call, in_transform)) return Reason::kTransform;
  if (any_operand(call, is_subclass) && !is_traced()) return Reason::kSubclass;
  if (call.dropout_p != 0.0) return Reason::kDropout;
  const bool trains = needs_gradient(call, autograd);
  if (trains && training == TrainingPolicy::kOff) return Reason::kGradients;
  if (trains && call.attn_mask && call.attn_mask->requires_grad()) return Reason::kMaskGradient;
  if (autograd == Autograd::kHere && c10::AutogradState::get_tls_state().get_fw_grad_mode() &&
      any_operand(call, has_tangent))
    return Reason::kForwardMode;
  if (any_operand(call, [](const Tensor& t) { return !t.device().is_mps(); })) return Reason::kDevice;
  if (!is_kernel_dtype(q.scalar_type()) || k.scalar_type() != q.scalar_type() ||
      v.scalar_type() != q.scalar_type())
    return Reason::kDType;
  if (call.attn_mask) {
    const at::ScalarType dtype = call.attn_mask->scalar_type();
    if (dtype != at::kBool && dtype != at::kFloat && dtype != q.scalar_type()) return Reason::kMaskDType;
    if (call.is_causal) return Reason::kMaskWithCausal;
  }
  if (q.dim() < 2 || q.dim() > kSdpaRank || k.dim() != q.dim() || v.dim() != q.dim()) return Reason::kRank;
  if (any_operand(call, has_unknown_size)) return Reason::kUnknownSizes;
  if (!has_kernel_for(size_of(q, 3)) || !has_kernel_for(size_of(v, 3))) return Reason::kHeadDim;
  if (trains && !(has_backward_for(size_of(q, 3)) && has_backward_for(size_of(v, 3))))
    return Reason::kWideGradient;
  const auto sizes = sizes_of(call);
  if (!sizes || !mask_fits(call, *sizes) || broadcasts_nothing(call, *sizes)) return Reason::kShapes;
  if (call.scale && !std::isfinite(static_cast<float>(2.0 * *call.scale))) return Reason::kScale;
  if (only_math_is_enabled()) return Reason::kMathAsked;
  if (!gpu_has_kernels()) return Reason::kNoKernel;
  const DeviceFacts& facts = facts_of(at::kMPS);
  if (trains)  // torch's own kernels have no backward
    return training_route(plain(call), facts, training).to_torch ? Reason::kSmallTraining : Reason::kNone;
  if (torch_is_faster(call, facts)) return Reason::kTorchIsFaster;
  return Reason::kNone;
}

// The scale of the unpadded heads.
std::optional<double> scale_of(const SdpaCall& call) {
  const SymInt head_dim = size_of(call.query, 3);
  if (call.scale || head_dim % kHeadDimMultiple == 0) return call.scale;
  return 1.0 / std::sqrt(double(head_dim.guard_int(__FILE__, __LINE__)));
}

// The result has the order of the query's memory: callers that split heads from [B, L, H * D] flatten it
// again, which is then a view.
bool is_token_major(const SdpaCall& call) {
  const Tensor& query = call.query;
  if (call.token_major_out || query.dim() < 3) return call.token_major_out;
  return TORCH_GUARD_OR_FALSE(query.sym_stride(-3).sym_lt(query.sym_stride(-2)));
}

Tensor prefill(const Tensor& query, const Tensor& key, const Tensor& value, const SdpaCall& call,
               bool trains) {
  static const auto without_gradient = c10::Dispatcher::singleton().findSchemaOrThrow("fattn::prefill", "");
  static const auto with_gradient = c10::Dispatcher::singleton().findSchemaOrThrow("fattn::attention", "");
  Invocation prefill(trains ? with_gradient : without_gradient);
  prefill.set("query", query).set("key", key).set("value", value).set("attn_mask", call.attn_mask);
  prefill.set("is_causal", call.is_causal).set("scale", scale_of(call));
  prefill.set("token_major_out", is_token_major(call));
  if (call.is_causal) prefill.set("q_offset", 0);  // torch aligns causal to the upper left corner
  return std::move(prefill).call()[0].toTensor();
}

Tensor decode(const Tensor& query, const Tensor& key, const Tensor& value, const SdpaCall& call) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("fattn::decode", "");
  Invocation decode(op);
  decode.set("query", query).set("key", key).set("value", value).set("attn_mask", call.attn_mask);
  decode.set("scale", scale_of(call));
  return std::move(decode).call()[0].toTensor();
}

Tensor run(const SdpaCall& call, Autograd autograd) {
  const Sizes sizes = *sizes_of(call);
  const Tensor query = operand_of(call.query, sizes.batch, sizes.q_heads);
  const Tensor key = operand_of(call.key, sizes.batch, sizes.kv_heads);
  const Tensor value = operand_of(call.value, sizes.batch, sizes.kv_heads);
  const bool traced = any_operand(call, is_subclass);
  if (needs_gradient(call, autograd)) {
    Tensor out = result_of(prefill(query, key, value, call, /*trains=*/true), call);
    const PlainCall described = plain(call);
    if (traced) {
      count(Taken::kTraced);
    } else {
      count_training(bytes_kept_by_torch(described) - bytes_kept(described));
    }
    return out;
  }
  // Decode cuts the keys of a single row into parts.
  if (!call.is_causal && query.sym_size(2) == 1) {
    Tensor out = result_of(decode(query, key, value, call), call);
    count(traced ? Taken::kTraced : Taken::kDecode);
    return out;
  }
  Tensor out = result_of(prefill(query, key, value, call, /*trains=*/false), call);
  count(traced ? Taken::kTraced : Taken::kPrefill);
  return out;
}

std::tuple<Tensor, int64_t> sdpa_and_reason(const Tensor& query, const Tensor& key, const Tensor& value,
                                            const std::optional<Tensor>& attn_mask, double dropout_p,
                                            bool is_causal, std::optional<double> scale, bool enable_gqa,
                                            bool token_major_out) {
  const SdpaCall call{query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, token_major_out};
  Reason reason = Reason::kNone;
  if (auto out = routed_sdpa(call, Autograd::kHere, reason)) return {*out, 0};
  const NextSdpaGoesToTorch decided;
  return {
      at::scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa),
      static_cast<int64_t>(reason)};
}

Tensor sdpa(const Tensor& query, const Tensor& key, const Tensor& value,
            const std::optional<Tensor>& attn_mask, double dropout_p, bool is_causal,
            std::optional<double> scale, bool enable_gqa, bool token_major_out) {
  return std::get<0>(sdpa_and_reason(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa,
                                     token_major_out));
}

// For callers with their own fallback: returns the reason without counting it.
int64_t sdpa_reason(const Tensor& query, const Tensor& key, const Tensor& value,
                    const std::optional<Tensor>& attn_mask, double dropout_p, bool is_causal,
                    std::optional<double> scale, bool enable_gqa) {
  const SdpaCall call{query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa};
  return static_cast<int64_t>(why_not(call, Autograd::kHere));
}

std::string megabytes(int64_t bytes) {
  std::ostringstream text;
  text << std::fixed << std::setprecision(1) << static_cast<double>(bytes) * 1e-6 << " MB";
  return text.str();
}

std::string text_of(const Route& route, const PlainCall& call, const DeviceFacts& facts) {
  return "torch keeps " + megabytes(bytes_kept_by_torch(call)) + ", the limit is " +
         megabytes(facts.working_set_bytes / kTrainingFraction) + "; " + route.provenance;
}

// Whether a plain call of these shapes runs in torch, and why: on the GPU that holds them, or with this
// family, system and torch.
std::tuple<bool, std::string> explained_route(const Tensor& query, const Tensor& key, const Tensor& value,
                                              const std::optional<Tensor>& attn_mask, bool is_causal,
                                              bool needs_gradient, std::optional<int64_t> family,
                                              std::optional<int64_t> cores, std::optional<int64_t> macos,
                                              std::optional<int64_t> torch,
                                              std::optional<std::string_view> tensor) {
  DeviceFacts facts = facts_of(query.device());
  if (family) {
    facts.family = static_cast<int>(*family);
    facts.tuned = nullptr;  // tuned rows apply only to the GPU of this process
    facts.units = {};
  }
  if (cores) facts.cores = static_cast<int>(*cores);
  if (macos) facts.macos = static_cast<int>(*macos);
  if (torch) facts.torch = static_cast<int>(*torch);
  if (tensor) facts.units.set_all(units_state(*tensor));
  const bool shares_heads = query.size(1) != key.size(1);
  const SdpaCall call{query, key, value, attn_mask, 0.0, is_causal, std::nullopt, shares_heads};
  const PlainCall described = plain(call);
  if (needs_gradient) {
    const Route route = training_route(described, facts, training);
    return {route.to_torch, text_of(route, described, facts)};
  }
  const Route route = route_of(described, facts, policy);
  std::string why = route.provenance;
  if (deciding_size(described, facts)) why += "; the first call runs the self-test, which may change this";
  return {route.to_torch, why};
}

// torch may append its whole kernel table.
std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

constexpr std::array<const char*, 3> kTrainingNames = {"auto", "fused", "off"};

void set_training(std::string name) {
  const auto* found = std::find(kTrainingNames.begin(), kTrainingNames.end(), name);
  TORCH_CHECK_VALUE(found != kTrainingNames.end(), "no training policy has the name ", name);
  training = TrainingPolicy(found - kTrainingNames.begin());
}

void append_text_of(std::ostream& text, const char* name, const Tensor& tensor) {
  text << name << ' ';
  if (tensor.is_nested()) {
    text << "nested ";
  } else if (tensor.layout() != at::kStrided) {
    text << tensor.layout() << ' ' << tensor.sym_sizes() << ' ';
  } else {
    text << tensor.sym_sizes() << ' ';
  }
  text << dtype_name(tensor);
  if (!tensor.device().is_mps()) text << " on " << tensor.device();
}

}  // namespace

NextSdpaGoesToTorch::NextSdpaGoesToTorch() : before_(next_goes_to_torch) { next_goes_to_torch = true; }
NextSdpaGoesToTorch::~NextSdpaGoesToTorch() { next_goes_to_torch = before_; }
bool NextSdpaGoesToTorch::consume() {
  const bool was = next_goes_to_torch;
  next_goes_to_torch = false;
  return was;
}

std::string text_of(const SdpaCall& call) {
  std::ostringstream text;
  append_text_of(text, "query", call.query);
  append_text_of(text, ", key", call.key);
  append_text_of(text, ", value", call.value);
  if (call.attn_mask && call.attn_mask->defined()) append_text_of(text, ", attn_mask", *call.attn_mask);
  if (call.dropout_p != 0.0) text << ", dropout_p " << call.dropout_p;
  if (call.is_causal) text << ", is_causal";
  if (call.scale) text << ", scale " << *call.scale;
  if (call.enable_gqa) text << ", enable_gqa";
  return text.str();
}

std::optional<Tensor> routed_sdpa(const SdpaCall& call, Autograd autograd, Reason& reason) {
  reason = why_not(call, autograd);
  if (reason == Reason::kNone) {
    try {
      return run(call, autograd);
    } catch (const c10::Error& error) {  // the checks above missed it; torch takes the call
      // The caller may free memory and retry; torch's own implementation needs at least as much.
      if (torch_error_of(error) == TorchError::kOutOfMemory) throw;
      reason = Reason::kRefused;
      count(reason, any_operand(call, is_subclass),
            [&] { return text_of(call) + ": " + first_line(error.what_without_backtrace()); });
      return std::nullopt;
    }
  }
  count(reason, reason != Reason::kSubclass && any_operand(call, is_subclass), [&] {
    const DeviceFacts& facts = facts_of(at::kMPS);
    if (reason == Reason::kTorchIsFaster)
      return text_of(call) + ": " + route_of(plain(call), facts, policy).provenance;
    if (reason == Reason::kSmallTraining)
      return text_of(call) + ": " + text_of(training_route(plain(call), facts, training), plain(call), facts);
    return text_of(call);
  });
  return std::nullopt;
}

TORCH_LIBRARY_FRAGMENT(fattn, library) {
  const std::string arguments =
      "Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, float dropout_p=0.0, "
      "bool is_causal=False, *, float? scale=None, bool enable_gqa=False";
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag};
  const std::string layout = ", bool token_major_out=False";
  library.def(("sdpa(" + arguments + layout + ") -> Tensor").c_str(), tags);
  library.def(("_sdpa_and_reason(" + arguments + layout + ") -> (Tensor, int)").c_str(), tags);
  library.def(("_sdpa_reason(" + arguments + ") -> int").c_str(), tags);
  library.def(
      "_route(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, bool is_causal, bool "
      "needs_gradient, int? family=None, int? cores=None, int? macos=None, int? torch=None, str? "
      "tensor=None) -> (bool, str)",
      explained_route);
  library.def("_may_go_to_torch() -> bool", [] { return may_go_to_torch(facts_of(at::kMPS), policy); });
  library.def("_set_training(str policy) -> ()", set_training);
  library.def("_training() -> str", [] { return std::string(kTrainingNames[size_t(training.load())]); });
  library.def("_route_always_here(bool on) -> ()",
              [](bool on) { policy = on ? RoutePolicy::kAlways : RoutePolicy::kAuto; });
}

// Composed of ops that torch differentiates, traces and transforms.
TORCH_LIBRARY_IMPL(fattn, CompositeImplicitAutograd, library) {
  library.impl("sdpa", sdpa);
  library.impl("_sdpa_and_reason", sdpa_and_reason);
  library.impl("_sdpa_reason", sdpa_reason);
}
TORCH_LIBRARY_IMPL(fattn, FuncTorchBatchedDecomposition, library) {
  library.impl("sdpa", sdpa);
  library.impl("_sdpa_and_reason", sdpa_and_reason);
  library.impl("_sdpa_reason", sdpa_reason);
}

}  // namespace fattn
