// Names, macros and function constants of a KernelSpec: the host's side of kernels/common/config.h.
#include <initializer_list>
#include <iterator>
#include <type_traits>

#include "kv_format.h"
#include "plan.h"

namespace fattn {

const char* name_of(Op op) {
#define FATTN_NAME(op, name, ...) "fattn." #name,
  static constexpr const char* kNames[] = {FATTN_OPS(FATTN_NAME)};
#undef FATTN_NAME
  return kNames[static_cast<size_t>(op)];
}

const char* name_of(DType dtype) {
#define FATTN_NAME(id, name, ...) #name,
  static constexpr const char* kNames[] = {FATTN_DTYPES(FATTN_NAME)};
#undef FATTN_NAME
  return kNames[static_cast<size_t>(dtype)];
}

int size_of(DType dtype) {
#define FATTN_SIZE(id, name, bytes, type) bytes,
  static constexpr int kSizes[] = {FATTN_DTYPES(FATTN_SIZE)};
#undef FATTN_SIZE
  return kSizes[static_cast<size_t>(dtype)];
}

const char* function_name(Kernel kernel) {
#define FATTN_NAME(kernel, name, source, Params) "fattn_" #name,
  static constexpr const char* kNames[] = {FATTN_KERNELS(FATTN_NAME)};
#undef FATTN_NAME
  return kNames[static_cast<size_t>(kernel)];
}

const char* source_name(Kernel kernel) {
#define FATTN_NAME(kernel, name, source, Params) #source,
  static constexpr const char* kNames[] = {FATTN_KERNELS(FATTN_NAME)};
#undef FATTN_NAME
  return kNames[static_cast<size_t>(kernel)];
}

const char* name_of(Slot operand) {
#define FATTN_NAME(slot, type, name, ...) #name,
  static constexpr const char* kNames[] = {FATTN_OPERANDS(FATTN_NAME, FATTN_NAME, FATTN_NAME, FATTN_NAME)};
#undef FATTN_NAME
  return kNames[operand];
}

const char* constant_name(FunctionConstant index) {
#define FATTN_NAME(type, name) #name,
  static constexpr const char* kNames[] = {FATTN_FUNCTION_CONSTANTS(FATTN_NAME)};
#undef FATTN_NAME
  return kNames[index];
}

namespace {
const char* metal_type(DType dtype) {
#define FATTN_TYPE(id, name, bytes, type) #type,
  static constexpr const char* kTypes[] = {FATTN_DTYPES(FATTN_TYPE)};
#undef FATTN_TYPE
  return kTypes[static_cast<size_t>(dtype)];
}
}  // namespace

std::vector<std::pair<std::string, std::string>> macros_of(const KernelSpec& spec) {
  if (spec.kernel == Kernel::kMaskMap) return {};
  std::vector<std::pair<std::string, std::string>> macros{
      {"FATTN_T", metal_type(spec.dtype)}, {"FATTN_SIMDGROUPS", std::to_string(spec.simdgroups)}};
  if (spec.kernel == Kernel::kMerge || spec.kernel == Kernel::kRmsNorm) {
    macros.emplace_back("FATTN_OUT_T", metal_type(spec.out_dtype));
  }
  if (spec.kernel == Kernel::kMerge) return macros;
  if (spec.kernel == Kernel::kRmsNorm) {
    macros.emplace_back("FATTN_NORM", std::to_string(spec.norm));
    macros.emplace_back("FATTN_WEIGHT_T", metal_type(spec.weight_dtype));
  }
  if (spec.kernel == Kernel::kCausalConv1d) {
    macros.emplace_back("FATTN_WEIGHT_T", metal_type(spec.weight_dtype));
    macros.emplace_back("FATTN_TAPS", std::to_string(spec.taps));
    return macros;
  }
  if (is_delta(spec.kernel)) {
    macros.emplace_back("FATTN_HEAD_DIM", std::to_string(spec.head_dim));
    macros.emplace_back("FATTN_VALUE_DIM", std::to_string(spec.value_dim));
    macros.emplace_back("FATTN_DECAY_T", metal_type(spec.decay_dtype));
    macros.emplace_back("FATTN_BETA_T", metal_type(spec.beta_dtype));
    macros.emplace_back("FATTN_A_LOG_T", metal_type(spec.a_log_dtype));
    macros.emplace_back("FATTN_DT_BIAS_T", metal_type(spec.dt_bias_dtype));
    macros.emplace_back("FATTN_CHANNEL_DECAY", spec.channel_decay ? "true" : "false");
    if (spec.kernel == Kernel::kGatedDeltaStep) {
      macros.emplace_back("FATTN_WEIGHT_T", metal_type(spec.weight_dtype));
      macros.emplace_back("FATTN_NORM_T", metal_type(spec.norm_dtype));
      macros.emplace_back("FATTN_TAPS", std::to_string(spec.taps));
    }
    return macros;
  }
  if (spec.kernel == Kernel::kBackwardHead) return macros;
  if (is_logits(spec.kernel) || spec.kernel == Kernel::kRmsNorm) {
    macros.emplace_back("FATTN_ROW_SIMDGROUPS", std::to_string(spec.row_simdgroups));
    macros.emplace_back("FATTN_VECTORS", std::to_string(spec.vectors));
    return macros;
  }
  if (uses_units(spec.kernel)) macros.emplace_back("FATTN_REGISTERS", spec.registers ? "1" : "0");
  macros.emplace_back("FATTN_HEAD_DIM", std::to_string(spec.head_dim));
  macros.emplace_back("FATTN_VALUE_DIM", std::to_string(spec.value_dim));
  if (spec.kernel == Kernel::kRotary) {
    macros.emplace_back("FATTN_ROTARY_DIM", std::to_string(spec.rotary_dim));
    macros.emplace_back("FATTN_ROTARY_OFFSET", std::to_string(spec.rotary_offset));
    macros.emplace_back("FATTN_ROTARY_STYLE", std::to_string(spec.style));
    macros.emplace_back("FATTN_NORM", std::to_string(spec.norm));
    macros.emplace_back("FATTN_TABLE_T", metal_type(spec.table_dtype));
    macros.emplace_back("FATTN_WEIGHT_T", metal_type(spec.weight_dtype));
  }
  if (spec.kernel == Kernel::kCacheWrite || spec.kernel == Kernel::kRotary) {
    macros.emplace_back("FATTN_KV_FORMAT", std::to_string(spec.kv_format));
    macros.emplace_back("FATTN_STORED_T", metal_type(storage_dtype(spec.kv_format, spec.dtype)));
    macros.emplace_back("FATTN_SCALE_T", metal_type(scale_dtype(spec.kv_format)));
    macros.emplace_back("FATTN_SLOT_T", spec.long_slots ? "long" : "int");
    return macros;
  }
  macros.emplace_back("FATTN_ROW_FRAGMENTS", std::to_string(spec.row_fragments));
  macros.emplace_back("FATTN_TILE_KEYS", std::to_string(spec.tile_keys));
  macros.emplace_back("FATTN_ROW_GROUPS", std::to_string(spec.row_groups));
  macros.emplace_back("FATTN_KV_FORMAT", std::to_string(spec.kv_format));
  macros.emplace_back("FATTN_NATIVE_BFLOAT", spec.native_bfloat ? "true" : "false");
  if (spec.chunks > 1) macros.emplace_back("FATTN_CHUNKS", std::to_string(spec.chunks));
  if (spec.chunk_rounds > 1) macros.emplace_back("FATTN_CHUNK_ROUNDS", std::to_string(spec.chunk_rounds));
  if (spec.kernel == Kernel::kDecodeWide) {
    macros.emplace_back("FATTN_VALUE_IN_KEY", spec.value_in_key ? "true" : "false");
  }
  if (spec.step_rows > 0) {
    macros.emplace_back("FATTN_STEP_ROWS", std::to_string(spec.step_rows));
  }
  if (is_simdgroup_prefill(spec.kernel) || is_backward(spec.kernel)) {
    macros.emplace_back("FATTN_EARLY_LOADS", spec.early_loads ? "true" : "false");
  }
  return macros;
}

std::vector<ConstantValue> constants_of(const KernelSpec& spec) {
  using uint = Features::uint;
#define FATTN_VALUE(type, name) {kConst_##name, std::is_same_v<type, bool>, spec.name},
  const ConstantValue all[] = {FATTN_FUNCTION_CONSTANTS(FATTN_VALUE)};
#undef FATTN_VALUE
  const auto only = [&](std::initializer_list<FunctionConstant> declared) {
    std::vector<ConstantValue> values;
    for (const FunctionConstant index : declared) values.push_back(all[index]);
    return values;
  };
  if (spec.kernel == Kernel::kTensorProbe) return {};
  if (spec.kernel == Kernel::kCacheWrite) return only({kConst_vector_loads, kConst_scales});
  if (spec.kernel == Kernel::kRotary) {
    return only({kConst_vector_loads, kConst_scales, kConst_query_norm, kConst_key_norm, kConst_slots,
                 kConst_starts, kConst_values, kConst_vector_tables});
  }
  if (spec.kernel == Kernel::kCausalConv1d) {
    return only({kConst_packed, kConst_sliced, kConst_slots, kConst_gate, kConst_has_state,
                 kConst_has_initial, kConst_biased});
  }
  if (spec.kernel == Kernel::kGatedDeltaStep) {
    return only({kConst_sliced, kConst_slots, kConst_gate, kConst_raw_gates, kConst_writes_state,
                 kConst_biased, kConst_counts, kConst_conv_state_out});
  }
  if (spec.kernel == Kernel::kGatedDeltaPrepare) {
    return only({kConst_packed, kConst_sliced, kConst_raw_gates, kConst_qk_norm});
  }
  if (spec.kernel == Kernel::kGatedDeltaScan) {
    return only({kConst_vector_loads, kConst_packed, kConst_sliced, kConst_slots, kConst_raw_gates,
                 kConst_has_state, kConst_writes_state, kConst_has_initial});
  }
  if (spec.kernel == Kernel::kRmsNorm) {
    return only({kConst_vector_loads, kConst_sliced, kConst_gate, kConst_weighted});
  }
  if (is_logits(spec.kernel)) return only({kConst_vector_loads, kConst_softcap, kConst_sliced});
  return {std::begin(all), std::end(all)};
}

}  // namespace fattn
