// Schemas and registration of the ops. Every call is described, planned and run.
#include <array>
#include <atomic>
#include <concepts>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <variant>
#include <vector>

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include "../describe/calls.h"
#include "autograd.h"
#include "device_data.h"
#include "../fallback/fallback.h"
#include "gpu.h"
#include "../plan/compiled.h"
#include "../plan/plan.h"

#ifdef FATTN_WITH_METAL
#include "../launch/launch.h"
#include "../metal/executor.h"
#include "../selftest/verdicts.h"
#include "matrix_units.h"
#endif

namespace fattn {
namespace {

using at::Tensor;
std::array<std::atomic<int64_t>, kKernelCount> launches{};

template <typename AnyCall>
Plan plan_of(const AnyCall& call) {
#ifdef FATTN_WITH_METAL
  if constexpr (std::derived_from<AnyCall, Call>) {
    if (call.device().is_mps()) return plan_to_run(call.problem, !is_step(call.problem));
  }
#endif
  return plan_or_raise(call.problem, facts_of(call.device()));
}

// Returns the results of the op: (out, lse), gradients, one tensor, or none. For `may_wait`, see fallback.h.
template <typename AnyCall>
auto run(const AnyCall& call, [[maybe_unused]] bool may_wait) {
  [[maybe_unused]] const Plan plan = plan_of(call);
  if constexpr (requires { check_device_data_if_enabled(call); }) check_device_data_if_enabled(call);
#ifdef FATTN_WITH_METAL
  if (call.device().is_mps()) {
    auto results = launch(call, plan);
    for (uint32_t i = 0; i < plan.pass_count; ++i) {
      const Pass& pass = plan.passes[i];
      launches[static_cast<size_t>(pass.spec.kernel)].fetch_add(pass.dispatches(), std::memory_order_relaxed);
    }
    return results;
  }
#endif
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(
      c10::autocast_dispatch_keyset);  // for the ops that we call
  if constexpr (requires { run_in_torch(call, may_wait); }) {
    return run_in_torch(call, may_wait);
  } else {
    return run_in_torch(call);
  }
}

void compile([[maybe_unused]] const Plan& plan) {
#ifdef FATTN_WITH_METAL
  metal::prepare(plan);
#else
  TORCH_CHECK_NOT_IMPLEMENTED(false, "fattn has nothing to compile: it was built without its Metal part");
#endif
}

std::string compiled_pipelines() {
#ifdef FATTN_WITH_METAL
  return to_json(metal::compiled_pipelines());
#else
  return to_json(std::vector<Compiled>());
#endif
}

// `numbers`: indices in compiled_pipelines.
std::string resources_without_limit([[maybe_unused]] std::vector<int64_t> numbers) {
#ifdef FATTN_WITH_METAL
  return to_json(metal::resources_without_limit(numbers));
#else
  return to_json(std::vector<Resources>());
#endif
}

// The plan of a call, for its device, for `device`, or for a GPU with these properties. `tensor`: the state
// of all tensor operations. `compiles`: also compiles it for the GPU of this process.
template <typename AnyCall>
std::string explained(const AnyCall& call, std::optional<std::string_view> device_name,
                      std::optional<int64_t> family, std::optional<int64_t> cores,
                      std::optional<std::string_view> tensor, std::optional<at::Device> device,
                      bool compiles) {
  DeviceFacts facts = facts_of(compiles ? at::Device(at::kMPS) : device.value_or(call.device()));
  if (device_name) facts.name = *device_name;
  if (family) facts.family = static_cast<int>(*family);
  if (cores) facts.cores = static_cast<int>(*cores);
  const bool is_other_gpu = device_name || family || cores;
  if (is_other_gpu) {  // tuned rows and states belong to the GPU of this process
    facts.tuned = nullptr;
    facts.units = {};
  }
  if (tensor) facts.units.set_all(units_state(*tensor));
  Plan plan = plan_or_raise(call.problem, facts);
#ifdef FATTN_WITH_METAL
  std::string why;
  if constexpr (std::derived_from<AnyCall, Call>) {
    if (!is_other_gpu && !tensor && facts.units.any()) {
      check_units_setting();
      if (compiles) plan = plan_to_run(call.problem, /*may_wait=*/true);
      const bool is_by_state = uses_units(plan) || !is_on(units_state(call.problem, gpu_facts().units));
      const std::string reason = is_by_state ? reason_of_state(call.problem) : "";
      why = plan.units;
      if (!reason.empty()) why += ": " + reason;
      plan.units = why.c_str();
    }
  }
#endif
  if (compiles) compile(plan);
  return to_json(plan, facts);
}

// The kernels that torch calls, derived from the function that describes a call. They are boxed: arguments
// are read by name.
template <auto describe>
struct OpOf {
  template <bool may_wait>
  static void run(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
    return_results(op, stack, fattn::run(described(Arguments(op, *stack)), may_wait));
  }

  // The same with other results: of a part of the keys, (out, sums) for merge.parts; or also the remainder of
  // a 16-bit out, for the graph nodes of differentiable.cpp.
  template <bool may_wait, bool Problem::* flag>
  static void run_with(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
    auto call = described(Arguments(op, *stack));
    call.problem.*flag = true;
    return_results(op, stack, fattn::run(call, may_wait));
  }

  template <bool is_part>
  static void explain(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
    const Arguments arguments(op, *stack);
    auto call = describe(arguments);
    if constexpr (is_part) call.problem.part = true;
    const auto name = arguments.get<std::optional<std::string>>("device_name");
    const auto tensor = arguments.get<std::optional<std::string>>("tensor");
    return_results(op, stack,
                   std::tuple(explained(call, name, arguments.get<std::optional<int64_t>>("family"),
                                        arguments.get<std::optional<int64_t>>("cores"), tensor,
                                        arguments.get<std::optional<at::Device>>("device"),
                                        arguments.get<bool>("compile"))));
  }

 private:
  static auto described(const Arguments& arguments) {
    auto call = describe(arguments);
    arguments.check_all_read();
    return call;
  }

  static void return_results(const c10::OperatorHandle& op, torch::jit::Stack* stack, Tensor result) {
    return_results(op, stack, std::tuple(std::move(result)));
  }
  static void return_results(const c10::OperatorHandle& op, torch::jit::Stack* stack,
                             std::vector<Tensor> results) {
    torch::jit::drop(*stack, op.schema().arguments().size());
    for (Tensor& result : results) torch::jit::push(*stack, std::move(result));
  }
  template <typename Results>
  static void return_results(const c10::OperatorHandle& op, torch::jit::Stack* stack, Results results) {
    torch::jit::drop(*stack, op.schema().arguments().size());
    std::apply([&](auto&... result) { torch::jit::push(*stack, std::move(result)...); }, results);
  }
};

Tensor refuse_backward(const Tensor&, std::string_view op) {
#define FATTN_REFUSE(id, name, ...)     \
  TORCH_CHECK(op != "fattn." #name, op, \
              " has no backward; use torch.softmax or torch.tanh where one is needed");
  FATTN_LOGITS_OPS(FATTN_REFUSE)
#undef FATTN_REFUSE
#define FATTN_REFUSE(id, name, ...)     \
  TORCH_CHECK(op != "fattn." #name, op, \
              " has no backward; use the model's own rotary embedding and norms where one is needed");
  FATTN_ROTARY_OPS(FATTN_REFUSE)
  FATTN_REFUSE(RmsNorm, rms_norm)
#undef FATTN_REFUSE
#define FATTN_REFUSE(id, name) \
  TORCH_CHECK(op != "fattn." #name, op, " has no backward; use the model's own layer where one is needed");
  FATTN_DELTA_OPS(FATTN_REFUSE)
#undef FATTN_REFUSE
  TORCH_CHECK(false, op,
              " has no backward; use torch_fattn.attention, torch_fattn.varlen_attention or "
              "torch.nn.functional.scaled_dot_product_attention where gradients are needed");
}

Tensor refuse_second_derivative(const Tensor&, std::string_view op) {
  TORCH_CHECK(false, op == "fattn.prefill_backward" ? "fattn.attention" : "fattn.varlen_attention",
              " has no second derivative; use "
              "torch.nn.functional.scaled_dot_product_attention under "
              "torch.nn.attention.sdpa_kernel(SDPBackend.MATH) where one is needed");
}

c10::Dict<std::string, int64_t> launch_counts() {
  c10::Dict<std::string, int64_t> counts;
  for (size_t i = 0; i < kKernelCount; ++i) counts.insert(function_name(Kernel(i)), launches[i].load());
  return counts;
}

void reset_launch_counts() {
  for (auto& count : launches) count = 0;
}

const std::string kOptions = [] {
  std::string text;
#define FATTN_NUMBER(type, name, value) \
  text += std::is_same_v<type, double> ? "float " #name "=" #value ", " : "int " #name "=" #value ", ";
#define FATTN_TENSOR(slot, name, shapes) text += "Tensor? " #name "=None, ";
  FATTN_SCORE_OPTIONS(FATTN_NUMBER, FATTN_TENSOR)
#undef FATTN_NUMBER
#undef FATTN_TENSOR
  return text + "float? scale=None";
}();
std::string flags([[maybe_unused]] bool of_prefill) {
  std::string text;
#define FATTN_FLAG(name, prefill_has_it) \
  if (prefill_has_it || !of_prefill) text += ", bool " #name "=False";
  FATTN_FLAGS(FATTN_FLAG)
#undef FATTN_FLAG
  return text;
}
const std::string kPrefillArguments =
    "Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, *, Tensor? mask_map=None, "
    "Tensor? block_mask=None, int[2] block_size=[128, 128], bool is_causal=False, SymInt? q_offset=None, "
    "Tensor? seq_lens=None, " +
    kOptions + flags(true);
const std::string kFormat = ", Tensor? key_scales=None, Tensor? value_scales=None, str kv_format=\"auto\"";
const std::string kDecodeArguments =
    "Tensor query, Tensor key, Tensor value, Tensor? seq_lens=None, *, Tensor? attn_mask=None, "
    "Tensor? tree_mask=None, " +
    kOptions + kFormat + flags(false);
const std::string kPagedDecodeArguments =
    "Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_tables, Tensor seq_lens, *, "
    "Tensor? attn_mask=None, Tensor? tree_mask=None, " +
    kOptions + kFormat + flags(false);
const std::string kPagedPrefillArguments =
    "Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_tables, Tensor seq_lens, "
    "Tensor cu_seqlens_q, SymInt max_seqlen_q, *, bool is_causal, " +
    kOptions + kFormat;
const std::string kVarlenPrefillArguments =
    "Tensor query, Tensor key, Tensor value, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, "
    "SymInt max_seqlen_k, *, bool is_causal=False, SymInt? q_offset=None, " +
    kOptions;
// The forward's arguments with the gradients of the results, and the results.
std::string backward_arguments(const std::string& forward) {
  const std::string operands = "Tensor query, Tensor key, Tensor value, ";
  return "Tensor grad_out, Tensor? grad_lse, " + operands + "Tensor? out, Tensor lse, " +
         forward.substr(operands.size()) + ", Tensor? out_remainder=None";
}
const std::string kDeviceArguments =
    "str? device_name=None, int? family=None, int? cores=None, str? tensor=None, Device? device=None, "
    "bool compile=False";
const std::string kGradients =
    " -> (Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_sinks, Tensor grad_alibi)";
const std::string kResults = " -> (Tensor out, Tensor lse)";
// A partial result in float32: out before it is divided by the sum of the weights, and sums [.., 4]
// (kSumFloats).
const std::string kPart = " -> (Tensor out, Tensor sums)";

const std::string kWrittenScales =
    ", Tensor(c!)? key_scales=None, Tensor(d!)? value_scales=None, str kv_format=\"auto\"";
const std::string kCacheWriteArguments =
    "Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slot_mapping, *" +
    kWrittenScales;
const std::string kRotaryOptions =
    "SymInt? rotary_dim=None, SymInt rotary_offset=0, str style=\"halves\", Tensor? query_norm=None, "
    "Tensor? key_norm=None, float eps=1e-6, str norm=\"rounded\"" +
    flags(true);
const std::string kRotaryWriteArguments =
    "Tensor query, Tensor key, Tensor value, Tensor cos, Tensor sin, Tensor(a!) key_cache, "
    "Tensor(b!) value_cache, Tensor? slot_mapping=None, *, SymInt start=0, Tensor? starts=None, " +
    kRotaryOptions + kWrittenScales;

// The arguments of the op that plans a call: it writes nothing, and takes a device.
std::string planning(std::string arguments) {
  for (size_t end; (end = arguments.find("!)")) != std::string::npos;) arguments.erase(end - 2, 4);
  const bool has_keywords = arguments.find("*,") != std::string::npos;
  return arguments + (has_keywords ? ", " : ", *, ") + kDeviceArguments;
}

const std::string kRmsNormArguments =
    "Tensor x, Tensor? weight=None, Tensor? gate=None, *, float eps=1e-6, str norm=\"rounded\", "
    "str activation=\"silu\", bool float32_out=False";

const std::string kGatedDeltaRuleArguments =
    "Tensor query, Tensor key, Tensor value, Tensor g, Tensor beta, Tensor(a!)? state=None, *, "
    "Tensor? A_log=None, Tensor? dt_bias=None, Tensor? has_initial_state=None, Tensor? slots=None, "
    "Tensor? cu_seqlens=None, float? scale=None, bool use_qk_l2norm_in_kernel=False, bool writes_state=True";
const std::string kGatedDeltaStepArguments =
    "Tensor query, Tensor key, Tensor value, Tensor z, Tensor a, Tensor b, Tensor A_log, Tensor dt_bias, "
    "Tensor conv_weight, Tensor? conv_bias, Tensor norm_weight, Tensor(a!) conv_state, Tensor(b!) state, *, "
    "Tensor? slots=None, Tensor? counts=None, Tensor(c!)? conv_state_out=None, str gate=\"silu\", "
    "float eps=1e-6, float? scale=None, bool writes_state=True";
const std::string kCausalConv1dArguments =
    "Tensor x, Tensor weight, Tensor? bias=None, Tensor(a!)? state=None, *, Tensor? has_initial_state=None, "
    "Tensor? slots=None, Tensor? cu_seqlens=None, str activation=\"none\"";

template <bool may_wait>
void register_ops(torch::Library& library) {
#define FATTN_IMPL(op, name, ...) library.impl(#name, boxed<OpOf<describe_##name>::run<may_wait>>());
  FATTN_OPS(FATTN_IMPL)
#undef FATTN_IMPL
#define FATTN_IMPL(op, name) \
  library.impl(#name ".part", boxed<OpOf<describe_##name>::run_with<may_wait, &Problem::part>>());
  FATTN_ATTENTION_OPS(FATTN_IMPL)
#undef FATTN_IMPL
  library.impl("merge.parts", boxed<OpOf<describe_merge_parts>::run<may_wait>>());
  // differentiable.cpp registers their autograd kernels.
  library.impl("attention", boxed<OpOf<describe_prefill>::run<may_wait>>());
  library.impl("varlen_attention", boxed<OpOf<describe_varlen_prefill>::run<may_wait>>());
  library.impl("_refuse_backward", refuse_backward);
  library.impl("_refuse_second_derivative", refuse_second_derivative);
}

}  // namespace

TORCH_LIBRARY(fattn, library) {
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag};
  const auto define = [&](const std::string& schema) { library.def(schema.c_str(), tags); };
  // An op, and the op that plans its calls.
  const auto define_op = [&](const std::string& name, const std::string& arguments,
                             const std::string& results) {
    define(name + "(" + arguments + ")" + results);
    define("_plan_" + name + "(" + planning(arguments) + ") -> str");
  };
  // For shared prefixes: the overloads .part attend to a part of the keys without rounding to the dtype, and
  // merge.parts merges parts.
#define FATTN_DEFINE(op, name)                  \
  define_op(#name, k##op##Arguments, kResults); \
  define_op(#name ".part", k##op##Arguments, kPart);
  FATTN_ATTENTION_OPS(FATTN_DEFINE)
#undef FATTN_DEFINE
#define FATTN_DEFINE(op, name, forward) \
  define_op(#name, backward_arguments(k##forward##Arguments), kGradients);
  FATTN_BACKWARD_OPS(FATTN_DEFINE)
#undef FATTN_DEFINE
  // The overloads .with_remainder are the forwards of a graph with 16-bit operands.
  for (const auto& [name, arguments] :
       {std::pair("attention", kPrefillArguments), {"varlen_attention", kVarlenPrefillArguments}}) {
    define(name + ("(" + arguments) + ")" + kResults);
    define(name + (".with_remainder(" + arguments) + ") -> (Tensor out, Tensor lse, Tensor out_remainder)");
  }
  define_op("merge", "Tensor outs, Tensor lses", kResults);
  define_op("merge.parts", "Tensor outs, Tensor sums, ScalarType dtype", kResults);
  define_op("cache_write", kCacheWriteArguments, " -> ()");
  define_op("rotary", "Tensor query, Tensor key, Tensor cos, Tensor sin, *, " + kRotaryOptions,
            " -> (Tensor out, Tensor key)");
  define_op("rotary_write", kRotaryWriteArguments, " -> Tensor");
  define_op("rms_norm", kRmsNormArguments, " -> Tensor");
#define FATTN_DEFINE(op, name) define_op(#name, k##op##Arguments, " -> Tensor");
  FATTN_DELTA_OPS(FATTN_DEFINE)
#undef FATTN_DEFINE
  define_op("mask_map", "Tensor attn_mask", " -> Tensor");
#define FATTN_DEFINE(op, name, ...) define_op(#name, "Tensor scores, *, float softcap=0.0", " -> Tensor");
  FATTN_ROW_OPS(FATTN_DEFINE)
#undef FATTN_DEFINE
#define FATTN_DEFINE(op, name, ...) define_op(#name, "Tensor x, float cap", " -> Tensor");
  FATTN_ELEMENT_OPS(FATTN_DEFINE)
#undef FATTN_DEFINE
  define("_refuse_backward(Tensor grad, str op) -> Tensor");
  define("_refuse_second_derivative(Tensor grad, str op) -> Tensor");

  library.def("_kernel_interface() -> str", kernel_interface);
  library.def("_compiled_pipelines() -> str", compiled_pipelines);
  library.def("_resources_without_limit(int[] numbers) -> str", resources_without_limit);
  library.def("_launch_counts() -> Dict(str, int)", launch_counts);
  library.def("_reset_launch_counts() -> ()", reset_launch_counts);
}

TORCH_LIBRARY_IMPL(fattn, CPU, library) { register_ops<true>(library); }
TORCH_LIBRARY_IMPL(fattn, CUDA, library) { register_ops<false>(library); }
#ifdef FATTN_WITH_METAL
TORCH_LIBRARY_IMPL(fattn, MPS, library) {
  register_ops<false>(library);
  constexpr auto kRemainder = &Problem::has_out_remainder;
  library.impl("attention.with_remainder", boxed<OpOf<describe_prefill>::run_with<false, kRemainder>>());
  library.impl("varlen_attention.with_remainder",
               boxed<OpOf<describe_varlen_prefill>::run_with<false, kRemainder>>());
}
#endif

TORCH_LIBRARY_IMPL(fattn, CompositeExplicitAutograd, library) {
#define FATTN_IMPL(op, name, ...) \
  library.impl("_plan_" #name, boxed<OpOf<describe_##name>::explain<false>>());
  FATTN_OPS(FATTN_IMPL)
#undef FATTN_IMPL
#define FATTN_IMPL(op, name) \
  library.impl("_plan_" #name ".part", boxed<OpOf<describe_##name>::explain<true>>());
  FATTN_ATTENTION_OPS(FATTN_IMPL)
#undef FATTN_IMPL
  library.impl("_plan_merge.parts", boxed<OpOf<describe_merge_parts>::explain<false>>());
}

}  // namespace fattn
