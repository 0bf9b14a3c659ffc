// A plan as plain data: kernels, their specialisation, parameters and grids. Nothing here is allocated on the
// heap: every decode step makes a plan.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "device.h"
#include "problem.h"
#include "scope.h"

namespace fattn {

// X(enumerator, name, source, parameters): the function is fattn_<name>, in <source>.metal.
#define FATTN_KERNELS(X)                                                              \
  X(Prefill, prefill, prefill, PrefillParams)                                         \
  X(PrefillWide, prefill_wide, prefill_wide, PrefillParams)                           \
  X(PrefillTensor, prefill_tensor, prefill_tensor, PrefillParams)                     \
  X(PrefillLatentTensor, prefill_latent_tensor, prefill_latent_tensor, PrefillParams) \
  X(TensorProbe, tensor_probe, tensor_probe, TensorProbeParams)                       \
  X(Decode, decode, decode, DecodeParams)                                             \
  X(DecodeWide, decode_wide, decode_wide, DecodeParams)                               \
  X(DecodeVector, decode_vector, decode_vector, DecodeParams)                         \
  X(Merge, merge, merge, MergeParams)                                                 \
  X(CacheWrite, cache_write, cache, CacheWriteParams)                                 \
  X(Rotary, rotary, rotary, RotaryParams)                                             \
  X(RmsNorm, rms_norm, rms_norm, RmsNormParams)                                       \
  X(GatedDeltaPrepare, gated_delta_prepare, gated_delta_prepare, GatedDeltaParams)    \
  X(GatedDeltaScan, gated_delta_scan, gated_delta_scan, GatedDeltaParams)             \
  X(GatedDeltaStep, gated_delta_step, gated_delta_step, GatedDeltaStepParams)         \
  X(CausalConv1d, causal_conv1d, causal_conv1d, CausalConv1dParams)                   \
  FATTN_LOGITS_OPS(X)                                                                 \
  X(MaskMap, mask_map, mask_map, MaskMapParams)                                       \
  FATTN_BACKWARD_KERNELS(X)
#define FATTN_BACKWARD_KERNELS(X)                                                      \
  X(BackwardQuery, backward_query, backward_query, BackwardParams)                     \
  X(BackwardKey, backward_key, backward_key, BackwardParams)                           \
  X(BackwardQueryTensor, backward_query_tensor, backward_query_tensor, BackwardParams) \
  X(BackwardKeyTensor, backward_key_tensor, backward_key_tensor, BackwardParams)       \
  X(BackwardHead, backward_head, backward_head, BackwardHeadParams)

#define FATTN_ENUMERATOR(kernel, name, source, Params) k##kernel,
enum class Kernel : uint8_t { FATTN_KERNELS(FATTN_ENUMERATOR) };
#undef FATTN_ENUMERATOR
#define FATTN_COUNT(...) +1
inline constexpr size_t kKernelCount = FATTN_KERNELS(FATTN_COUNT);
#undef FATTN_COUNT

inline bool is_logits(Kernel kernel) {
#define FATTN_IS(id, ...) || kernel == Kernel::k##id
  return false FATTN_LOGITS_OPS(FATTN_IS);
#undef FATTN_IS
}
// Kernels of the gated delta rule.
inline bool is_delta(Kernel kernel) {
  return kernel == Kernel::kGatedDeltaPrepare || kernel == Kernel::kGatedDeltaScan ||
         kernel == Kernel::kGatedDeltaStep;
}
inline bool is_backward(Kernel kernel) {
#define FATTN_IS(id, ...) || kernel == Kernel::k##id
  return false FATTN_BACKWARD_KERNELS(FATTN_IS);
#undef FATTN_IS
}
// Prefill kernels that use simdgroup matrices.
inline bool is_simdgroup_prefill(Kernel kernel) {
  return kernel == Kernel::kPrefill || kernel == Kernel::kPrefillWide;
}
// Kernels on matrix units. Their libraries need MSL 4.0.
inline bool uses_units(Kernel kernel) {
  return kernel == Kernel::kPrefillTensor || kernel == Kernel::kPrefillLatentTensor ||
         kernel == Kernel::kTensorProbe || kernel == Kernel::kBackwardQueryTensor ||
         kernel == Kernel::kBackwardKeyTensor;
}

// The function constants of a pipeline.
struct Features {
  using uint = uint32_t;
#define FATTN_FEATURE(type, name) type name{};
  FATTN_FUNCTION_CONSTANTS(FATTN_FEATURE)
#undef FATTN_FEATURE
  bool operator==(const Features&) const = default;
};

// Identifies one compiled pipeline. The first half becomes preprocessor macros (one small library per
// combination), the constants become Metal function constants.
struct KernelSpec : Features, RotaryForm {
  Kernel kernel = Kernel::kPrefill;
  DType dtype = DType::kFloat32;      // of the operands; merge: of the partial results
  DType out_dtype = DType::kFloat32;  // differs from dtype only in merge and rms_norm
  uint16_t head_dim = 0;
  uint16_t value_dim = 0;
  uint16_t row_fragments = 0;  // 8-row fragments per simdgroup
  uint16_t tile_keys = 0;
  uint16_t simdgroups = 0;
  uint16_t row_groups = 1;  // per threadgroup; of one row in decode_vector, of eight in other decodes, of the
                            // fragments in prefill_wide and the backward
  uint16_t chunks = 1;      // decode, decode_vector: chunks of a sequence in flight per threadgroup
  uint16_t chunk_rounds = 1;    // decode_vector: rounds of `chunks`
  bool value_in_key = false;    // decode_wide
  bool early_loads = false;     // prefill, prefill_wide
  bool native_bfloat = false;   // Q, K and V are multiplied as bfloat
  bool registers = false;       // on matrix units: scores stay in registers
  uint16_t step_rows = 0;       // backward over keys: query rows per step
  uint16_t row_simdgroups = 1;  // softmax, rms_norm: per row
  uint16_t vectors = 1;         // softmax, rms_norm: per thread

  // Linear attention.
  DType decay_dtype = DType::kFloat32;
  DType beta_dtype = DType::kFloat32;
  DType a_log_dtype = DType::kFloat32;
  DType dt_bias_dtype = DType::kFloat32;
  bool channel_decay = false;
  DType norm_dtype = DType::kFloat32;  // gated_delta_step
  uint16_t taps = 0;                   // of the convolution

  KvFormat kv_format = kKvFloat;
  bool long_slots = false;  // cache_write, rotary: slot_mapping or starts is int64

  bool operator==(const KernelSpec&) const = default;
};

// The name of the kernel function, and of the .metal file (without its ending) that holds it.
const char* function_name(Kernel kernel);
const char* source_name(Kernel kernel);
// The macros to define when the source is compiled.
std::vector<std::pair<std::string, std::string>> macros_of(const KernelSpec& spec);

struct ConstantValue {
  FunctionConstant index;
  bool is_bool;  // else uint
  uint32_t value;
};
// Function constants that the kernel declares, all of them, with their values.
std::vector<ConstantValue> constants_of(const KernelSpec& spec);
const char* constant_name(FunctionConstant index);

// The name of an operand in explain. Partial results, and a mask map made by the plan, live from the first
// pass to the last.
const char* name_of(Slot operand);

// Binds `operand` to `slot`. They differ if the whole call returns a partial result: the kernel writes it to
// the slot of partial results.
struct Binding {
  Slot operand;
  Slot slot;
};

struct Pass {
  KernelSpec spec;
  std::array<uint32_t, 3> grid{};     // threadgroups
  uint32_t slice = 0;                 // threadgroups per dispatch, if the pass is sliced
  std::array<uint32_t, 3> threads{};  // per threadgroup
  uint32_t threadgroup_bytes = 0;     // static, as the kernel declares it

  std::array<Binding, 18> bindings{};  // gated_delta_step may bind all of them
  uint32_t binding_count = 0;
  std::array<std::byte, sizeof(BackwardParams)> params{};  // the kernel's struct; this is the largest
  uint32_t params_size = 0;

  int64_t groups() const { return int64_t(grid[0]) * grid[1] * grid[2]; }
  int64_t dispatches() const { return spec.sliced ? (groups() + slice - 1) / slice : 1; }
  void bind(Slot operand) { bind(operand, operand); }
  void bind(Slot operand, Slot slot) { bindings[binding_count++] = {operand, slot}; }
  template <typename Params>
  void set_params(const Params& value) {
    static_assert(std::is_trivially_copyable_v<Params> && sizeof(Params) <= sizeof(params));
    std::memcpy(params.data(), &value, sizeof value);
    params_size = sizeof value;
  }
};

struct Plan {
  std::array<Pass, 5> passes{};
  uint32_t pass_count = 0;  // 0: the result is empty, nothing is launched
  int64_t scratch_out_floats = 0;
  int64_t scratch_sum_floats = 0;
  int64_t scratch_map_bytes = 0;     // of the mask map that the first pass makes
  int64_t scratch_chunk_floats = 0;  // gated_delta_rule: of what its first pass knows of the chunks
  int64_t scratch_row_floats = 0;    // backward: of the states of the query rows
  int64_t kept_bytes = 0;            // backward: of the forward's tensors that it reads
  Scope tuning;                      // of the tile and chunk sizes
  Scope key_tuning;                  // backward: the same for the pass over keys
  const char* launches = "";         // decode: how many, and why
  const char* units = "";            // on a GPU with matrix units: whether the plan uses them, and why

  Pass& add_pass() { return passes[pass_count++]; }
};
inline bool uses_units(const Plan& plan) {
  return std::any_of(plan.passes.begin(), plan.passes.begin() + plan.pass_count,
                     [](const Pass& pass) { return uses_units(pass.spec.kernel); });
}

struct Refusal {
  enum class Kind : uint8_t { kValue, kType, kNotImplemented };
  Kind kind;
  std::string message;  // one sentence: op, value, limit, what to do instead
};

// Refuse problems that the kernels do not support, and GPUs that cannot run them.
std::optional<Refusal> check(const Problem& problem);
std::optional<Refusal> check(const MergeProblem& problem);
std::optional<Refusal> check(const CacheWriteProblem& problem);
std::optional<Refusal> check(const RotaryProblem& problem);
std::optional<Refusal> check(const RmsNormProblem& problem);
std::optional<Refusal> check(const GatedDeltaProblem& problem);
std::optional<Refusal> check(const GatedDeltaStepProblem& problem);
std::optional<Refusal> check(const CausalConv1dProblem& problem);
std::optional<Refusal> check(const LogitsProblem& problem);
std::optional<Refusal> check(const MaskMapProblem& problem);
std::optional<Refusal> check(const DeviceFacts& device, Op op);

std::variant<Plan, Refusal> plan(const Problem& problem, const DeviceFacts& device);
std::variant<Plan, Refusal> plan(const MergeProblem& problem, const DeviceFacts& device);
std::variant<Plan, Refusal> plan(const CacheWriteProblem& problem, const DeviceFacts& device);
std::variant<Plan, Refusal> plan(const RotaryProblem& problem, const DeviceFacts& device);
std::variant<Plan, Refusal> plan(const RmsNormProblem& problem, const DeviceFacts& device);
std::variant<Plan, Refusal> plan(const GatedDeltaProblem& problem, const DeviceFacts& device);
std::variant<Plan, Refusal> plan(const GatedDeltaStepProblem& problem, const DeviceFacts& device);
std::variant<Plan, Refusal> plan(const CausalConv1dProblem& problem, const DeviceFacts& device);
std::variant<Plan, Refusal> plan(const LogitsProblem& problem, const DeviceFacts& device);
std::variant<Plan, Refusal> plan(const MaskMapProblem& problem, const DeviceFacts& device);

// A pass that reads how the GPU lays out the operands of the tensor kernels, into kSlotTensorFacts
// (kernels/prefill/tensor_probe.metal).
Plan plan_tensor_probe(UnitsSize size, bool registers);

// The plan as JSON text, for people, golden tests and tools.
std::string to_json(const Plan& plan, const DeviceFacts& device);
// The kernel interface as JSON: buffer slots, function constant indices, and the parameter struct of each
// kernel with the offsets of its fields.
std::string kernel_interface();

}  // namespace fattn
