// A plan as JSON text.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <string_view>
#include <type_traits>

#include "compiled.h"
#include "plan.h"
#include "registers.h"

namespace fattn {
namespace {

// The structs of parameters, each with its list of fields.
#define FATTN_PARAMS(X)                                  \
  X(PrefillParams, FATTN_PREFILL_PARAMS)                 \
  X(DecodeParams, FATTN_DECODE_PARAMS)                   \
  X(TensorProbeParams, FATTN_TENSOR_PROBE_PARAMS)        \
  X(MergeParams, FATTN_MERGE_PARAMS)                     \
  X(CacheWriteParams, FATTN_CACHE_WRITE_PARAMS)          \
  X(RotaryParams, FATTN_ROTARY_PARAMS)                   \
  X(LogitsParams, FATTN_LOGITS_PARAMS)                   \
  X(MaskMapParams, FATTN_MASK_MAP_PARAMS)                \
  X(RmsNormParams, FATTN_RMS_NORM_PARAMS)                \
  X(GatedDeltaParams, FATTN_GATED_DELTA_PARAMS)          \
  X(GatedDeltaStepParams, FATTN_GATED_DELTA_STEP_PARAMS) \
  X(CausalConv1dParams, FATTN_CAUSAL_CONV1D_PARAMS)      \
  X(BackwardParams, FATTN_BACKWARD_PARAMS)               \
  X(BackwardHeadParams, FATTN_BACKWARD_HEAD_PARAMS)

// Writes values in order, with commas and quotes.
class JsonWriter {
 public:
  void open(char bracket) {
    separate();
    text_ += bracket;
    first_ = true;
  }
  void close(char bracket) {
    text_ += bracket;
    first_ = false;
  }
  void key(std::string_view name) {
    value(name);
    text_ += ':';
    first_ = true;  // the value follows without a comma
  }

  void value(int64_t number) { integer(number); }
  void value(int32_t number) { integer(number); }
  void value(uint32_t number) { integer(number); }
  void value(float number) {
    separate();
    char digits[32];
    std::snprintf(digits, sizeof digits, "%.9g", number);
    text_ += std::isfinite(number) ? digits : "null";
  }
  void value(bool flag) {
    separate();
    text_ += flag ? "true" : "false";
  }
  void value(std::string_view string) {
    separate();
    text_ += '"';
    for (const char c : string) {
      if (c == '"' || c == '\\') text_ += '\\';
      text_ += c < ' ' && c >= 0 ? ' ' : c;
    }
    text_ += '"';
  }
  void value(const char* string) { value(std::string_view(string)); }
  void value(const std::string& string) { value(std::string_view(string)); }
  void value(const std::array<uint32_t, 3>& extent) {
    open('[');
    for (const uint32_t number : extent) value(number);
    close(']');
  }
  void value(const fattn_i64 (&numbers)[kLogitsDims]) {
    open('[');
    for (const fattn_i64 number : numbers) value(number);
    close(']');
  }

#define FATTN_WRITE(type, name) field(#name, params.name);
#define FATTN_VALUE(Params, LIST)    \
  void value(const Params& params) { \
    open('{');                       \
    LIST(FATTN_WRITE)                \
    close('}');                      \
  }
  FATTN_VALUE(Strides3, FATTN_STRIDES3)
  FATTN_VALUE(Strides4, FATTN_STRIDES4)
  FATTN_VALUE(TableStrides, FATTN_TABLE_STRIDES)
  FATTN_VALUE(TokenStrides, FATTN_TOKEN_STRIDES)
  FATTN_VALUE(CausalSpan, FATTN_CAUSAL_SPAN)
  FATTN_PARAMS(FATTN_VALUE)
#undef FATTN_VALUE
#undef FATTN_WRITE

  template <typename T>
  void field(std::string_view name, const T& content) {
    key(name);
    value(content);
  }

  std::string take() { return std::move(text_); }

 private:
  void separate() {
    if (!first_) text_ += ',';
    first_ = false;
  }
  void integer(int64_t number) {
    separate();
    text_ += std::to_string(number);
  }

  std::string text_;
  bool first_ = true;
};

template <typename Params>
Params params_of(const Pass& pass) {
  Params params;
  std::memcpy(&params, pass.params.data(), sizeof params);
  return params;
}

void write_params(JsonWriter& json, const Pass& pass) {
#define FATTN_CASE(kernel, name, source, Params) \
  case Kernel::k##kernel:                        \
    return json.field("params", params_of<Params>(pass));
  switch (pass.spec.kernel) { FATTN_KERNELS(FATTN_CASE) }
#undef FATTN_CASE
}

// The bytes of the parameter struct, for tools that run the plan elsewhere.
std::string hex_of(const Pass& pass) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string text;
  for (uint32_t i = 0; i < pass.params_size; ++i) {
    const auto byte = std::to_integer<uint32_t>(pass.params[i]);
    text += kDigits[byte >> 4];
    text += kDigits[byte & 15];
  }
  return text;
}

// The fields that identify the pipeline.
void write_fields(JsonWriter& json, const KernelSpec& spec) {
  json.field("kernel", function_name(spec.kernel));
  json.field("source", std::string(source_name(spec.kernel)) + ".metal");

  json.key("macros");
  json.open('{');
  for (const auto& [name, value] : macros_of(spec)) json.field(name, value);
  json.close('}');

  json.key("constants");
  json.open('{');
  for (const ConstantValue& constant : constants_of(spec)) {
    json.key(constant_name(constant.index));
    constant.is_bool ? json.value(constant.value != 0) : json.value(constant.value);
  }
  json.close('}');
}

void write(JsonWriter& json, const Registers& registers) {
  json.key("registers");
  json.open('{');
#define FATTN_WRITE(name) json.field(#name, registers.name);
  FATTN_REGISTERS(FATTN_WRITE)
#undef FATTN_WRITE
  json.field("total", registers.total());
  json.close('}');
}

bool binds(const Pass& pass, Slot operand) {
  const auto end = pass.bindings.begin() + pass.binding_count;
  return std::any_of(pass.bindings.begin(), end, [&](const Binding& b) { return b.operand == operand; });
}

// The limits of a row of the tuning tables, and the source of its sizes.
std::string text_of(const Scope& scope) {
  std::string text;
  const auto add = [&](bool limits, const std::string& limit) {
    if (limits) text += (text.empty() ? "" : ", ") + limit;
  };
  add(scope.dtypes == k16Bit, "16-bit");
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16})
    add(scope.dtypes == set_of(dtype), name_of(dtype));
  add(scope.formats == kQuantised, "quantised cache");
  add(scope.formats == kInt8AndFp8, "int8 or fp8 cache");
  add(scope.formats == kInt4s, "int4 cache");
  add(scope.max_dim != kAnyDim, "D <= " + std::to_string(scope.max_dim));
  add(scope.min_family != kAnyFamily, "family " + std::to_string(scope.min_family) + " and later");
  add(scope.registers, "scores in registers");
  return text.empty() ? scope.source : text + " (" + scope.source + ")";
}

// The scratch that this pass writes or reads.
int64_t scratch_bytes(const Plan& plan, const Pass& pass) {
  int64_t bytes = 0;
  if (binds(pass, kSlotRowStates)) bytes += plan.scratch_row_floats * int64_t{sizeof(float)};
  if (binds(pass, kSlotMaskMap)) bytes += plan.scratch_map_bytes;
  return bytes;
}

void write(JsonWriter& json, const Plan& plan, const Pass& pass) {
  json.open('{');
  write_fields(json, pass.spec);
  json.field("grid", pass.grid);
  if (pass.spec.sliced) json.field("slice", pass.slice);
  json.field("threads", pass.threads);
  json.field("threadgroup_bytes", pass.threadgroup_bytes);
  if (is_backward(pass.spec.kernel)) json.field("scratch_bytes", scratch_bytes(plan, pass));
  if (has_registers(pass.spec.kernel)) write(json, registers_of(pass.spec));

  json.key("bindings");
  json.open('{');
  for (uint32_t i = 0; i < pass.binding_count; ++i) {
    json.field(name_of(pass.bindings[i].operand), static_cast<uint32_t>(pass.bindings[i].slot));
  }
  json.field("params", static_cast<uint32_t>(kSlotParams));
  if (pass.spec.sliced) json.field("slice", static_cast<uint32_t>(kSlotSlice));
  json.close('}');

  write_params(json, pass);
  json.field("params_bytes", hex_of(pass));
  json.close('}');
}

}  // namespace

std::string to_json(const Plan& plan, const DeviceFacts& device) {
  JsonWriter json;
  json.open('{');
  json.key("device");
  json.open('{');
  json.field("name", device.name);
  json.field("family", device.family);
  json.field("cores", device.cores);
  json.field("max_threadgroup_bytes", device.max_threadgroup_bytes);
  json.close('}');

  json.key("passes");
  json.open('[');
  for (uint32_t i = 0; i < plan.pass_count; ++i) write(json, plan, plan.passes[i]);
  json.close(']');

  const int64_t floats =
      plan.scratch_out_floats + plan.scratch_sum_floats + plan.scratch_row_floats + plan.scratch_chunk_floats;
  json.field("scratch_bytes", floats * int64_t{sizeof(float)} + plan.scratch_map_bytes);
  if (plan.kept_bytes > 0) json.field("kept_bytes", plan.kept_bytes);
  const bool two_walks = *plan.key_tuning.source != '\0';
  json.field("tuning", two_walks ? "rows: " + text_of(plan.tuning) + "; keys: " + text_of(plan.key_tuning)
                                 : text_of(plan.tuning));
  if (*plan.launches != '\0') json.field("launches", plan.launches);
  if (*plan.units != '\0') json.field("tensor", plan.units);
  json.close('}');
  return json.take();
}

namespace {

// The type of a parameter as Python's struct module has it; "" for a struct or an array.
template <typename T>
constexpr const char* code_of() {
  if constexpr (std::is_same_v<T, fattn_i64>) return "q";
  if constexpr (std::is_same_v<T, fattn_i32>) return "i";
  if constexpr (std::is_same_v<T, fattn_f32>) return "f";
  return "";
}

}  // namespace

std::string kernel_interface() {
  JsonWriter json;
  json.open('{');
  json.key("operands");
  json.open('[');
  for (int i = 0; i < kSlotCount; ++i) json.value(name_of(Slot(i)));
  json.close(']');
  json.key("constants");
  json.open('[');
  for (int i = 0; i < kConstCount; ++i) json.value(constant_name(FunctionConstant(i)));
  json.close(']');
  json.key("kernels");
  json.open('{');
#define FATTN_KERNEL(kernel, name, source, Params) json.field("fattn_" #name, #Params);
  FATTN_KERNELS(FATTN_KERNEL)
#undef FATTN_KERNEL
  json.close('}');
  json.key("kv_formats");
  json.open('{');
#define FATTN_KV_FORMAT(number, id, name, storage, packed, scales, largest) \
  json.key(name);                                                           \
  json.open('{');                                                           \
  json.field("number", int64_t{number});                                    \
  json.field("storage", #storage);                                          \
  json.field("packed", int64_t{packed});                                    \
  json.field("scales", #scales);                                            \
  json.field("largest", int64_t{largest});                                  \
  json.close('}');
  FATTN_KV_FORMATS(FATTN_KV_FORMAT)
#undef FATTN_KV_FORMAT
  json.close('}');
  // Offset and type of each field, by struct.
  json.key("params");
  json.open('{');
#define FATTN_PLACE(type, name)                \
  json.key(#name);                             \
  json.open('[');                              \
  json.value(int64_t(offsetof(Params, name))); \
  json.value(code_of<type>());                 \
  json.close(']');
#define FATTN_PLACES(Type, LIST) \
  {                              \
    using Params = Type;         \
    json.key(#Type);             \
    json.open('{');              \
    LIST(FATTN_PLACE)            \
    json.close('}');             \
  }
  FATTN_PARAMS(FATTN_PLACES)
  FATTN_PLACES(CausalSpan, FATTN_CAUSAL_SPAN)
#undef FATTN_PLACES
#undef FATTN_PLACE
  json.close('}');
  json.close('}');
  return json.take();
}

namespace {

void write_results(JsonWriter& json, const Compiled& pipeline) {
  json.field("library_seconds", float(pipeline.library_seconds));
  json.field("pipeline_seconds", float(pipeline.pipeline_seconds));
  json.field("archived", pipeline.archived);
}

void write_results(JsonWriter& json, const Resources& pipeline) {
  json.field("max_threads", pipeline.max_threads);
  json.field("execution_width", pipeline.execution_width);
  json.field("static_bytes", pipeline.static_bytes);
}

// Writes the key fields of each pipeline too.
template <typename Pipeline>
std::string list_of(const std::vector<Pipeline>& pipelines) {
  JsonWriter json;
  json.open('[');
  for (const Pipeline& pipeline : pipelines) {
    json.open('{');
    write_fields(json, pipeline.spec);
    write_results(json, pipeline);
    json.close('}');
  }
  json.close(']');
  return json.take();
}

}  // namespace

std::string to_json(const std::vector<Compiled>& pipelines) { return list_of(pipelines); }
std::string to_json(const std::vector<Resources>& pipelines) { return list_of(pipelines); }

}  // namespace fattn
