// A plan as JSON text.
#include <cmath>
#include <cstdio>
#include <string_view>

#include "compiled.h"
#include "plan.h"

namespace fattn {
namespace {

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
  void value(const Strides3& strides) {
    open('{');
    field("batch", strides.batch);
    field("head", strides.head);
    field("row", strides.row);
    close('}');
  }
  void value(const Strides4& strides) {
    open('{');
    field("batch", strides.batch);
    field("head", strides.head);
    field("row", strides.row);
    field("key", strides.key);
    close('}');
  }

  void value(const CausalSpan& span) {
    open('{');
    field("q_len", span.q_len);
    field("window_left", span.window_left);
    field("sink_tokens", span.sink_tokens);
    field("capacity", span.capacity);
    field("chunk_unit", span.chunk_unit);
    field("least_chunk", span.least_chunk);
    field("most_chunks", span.most_chunks);
    field("largest_chunk", span.largest_chunk);
    field("seq_lens_stride", span.seq_lens_stride);
    close('}');
  }

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

#define FATTN_FIELD(name) json.field(#name, params.name)

void write(JsonWriter& json, const PrefillParams& params) {
  FATTN_FIELD(query);
  FATTN_FIELD(key);
  FATTN_FIELD(value);
  FATTN_FIELD(key_scales);
  FATTN_FIELD(value_scales);
  FATTN_FIELD(mask);
  FATTN_FIELD(mask_map);
  FATTN_FIELD(out);
  FATTN_FIELD(block_table_batch_stride);
  FATTN_FIELD(block_table_entry_stride);
  FATTN_FIELD(seq_lens_stride);
  FATTN_FIELD(cu_seqlens_stride);
  FATTN_FIELD(cu_seqlens_k_stride);
  FATTN_FIELD(sinks_stride);
  FATTN_FIELD(alibi_slopes_batch_stride);
  FATTN_FIELD(alibi_slopes_stride);
  FATTN_FIELD(batch);
  FATTN_FIELD(q_len);
  FATTN_FIELD(kv_len);
  FATTN_FIELD(q_heads);
  FATTN_FIELD(group_size);
  FATTN_FIELD(q_offset);
  FATTN_FIELD(window_left);
  FATTN_FIELD(window_right);
  FATTN_FIELD(sink_tokens);
  FATTN_FIELD(num_blocks);
  FATTN_FIELD(q_tiles);
  FATTN_FIELD(kv_rows);
  FATTN_FIELD(last_rows_meet);
  FATTN_FIELD(score_scale);
  FATTN_FIELD(softcap);
  FATTN_FIELD(slope_scale);
  FATTN_FIELD(parts);
  FATTN_FIELD(least_part);
  FATTN_FIELD(heads_first);
}

void write(JsonWriter& json, const DecodeParams& params) {
  FATTN_FIELD(query);
  FATTN_FIELD(key);
  FATTN_FIELD(value);
  FATTN_FIELD(key_scales);
  FATTN_FIELD(value_scales);
  FATTN_FIELD(mask);
  FATTN_FIELD(block_table_batch_stride);
  FATTN_FIELD(block_table_entry_stride);
  FATTN_FIELD(sinks_stride);
  FATTN_FIELD(alibi_slopes_batch_stride);
  FATTN_FIELD(alibi_slopes_stride);
  FATTN_FIELD(tree_mask_batch_stride);
  FATTN_FIELD(tree_mask_row_stride);
  FATTN_FIELD(span);
  FATTN_FIELD(batch);
  FATTN_FIELD(q_heads);
  FATTN_FIELD(group_size);
  FATTN_FIELD(num_blocks);
  FATTN_FIELD(row_blocks);
  FATTN_FIELD(score_scale);
  FATTN_FIELD(softcap);
  FATTN_FIELD(slope_scale);
  FATTN_FIELD(shares);
}

void write(JsonWriter& json, const MergeParams& params) {
  FATTN_FIELD(rows);
  FATTN_FIELD(parts);
  FATTN_FIELD(head_dim);
  FATTN_FIELD(rows_per_sequence);
  FATTN_FIELD(span);
  FATTN_FIELD(puts_part);
}

void write(JsonWriter& json, const MaskMapParams& params) {
  FATTN_FIELD(mask);
  FATTN_FIELD(heads);
  FATTN_FIELD(rows);
  FATTN_FIELD(keys);
  FATTN_FIELD(row_cells);
  FATTN_FIELD(key_cells);
  FATTN_FIELD(row_groups);
}

void write(JsonWriter& json, const LogitsParams& params) {
  FATTN_FIELD(sizes);
  FATTN_FIELD(strides);
  FATTN_FIELD(column_stride);
  FATTN_FIELD(rows);
  FATTN_FIELD(columns);
  FATTN_FIELD(dims);
  FATTN_FIELD(cap);
}

void write(JsonWriter& json, const CacheWriteParams& params) {
  FATTN_FIELD(key_token_stride);
  FATTN_FIELD(key_head_stride);
  FATTN_FIELD(value_token_stride);
  FATTN_FIELD(value_head_stride);
  FATTN_FIELD(key_cache);
  FATTN_FIELD(value_cache);
  FATTN_FIELD(key_scales);
  FATTN_FIELD(value_scales);
  FATTN_FIELD(slot_stride);
  FATTN_FIELD(slots);
  FATTN_FIELD(rows);
  FATTN_FIELD(kv_heads);
  FATTN_FIELD(block_size);
}

#undef FATTN_FIELD

template <typename Params>
void write_params_as(JsonWriter& json, const Pass& pass) {
  Params params;
  std::memcpy(&params, pass.params.data(), sizeof params);
  write(json, params);
}

void write_params(JsonWriter& json, const Pass& pass) {
  switch (pass.spec.kernel) {
    case Kernel::kPrefill:
    case Kernel::kPrefillWide:
      return write_params_as<PrefillParams>(json, pass);
    case Kernel::kDecode:
    case Kernel::kDecodeWide:
      return write_params_as<DecodeParams>(json, pass);
    case Kernel::kMerge:
      return write_params_as<MergeParams>(json, pass);
    case Kernel::kCacheWrite:
      return write_params_as<CacheWriteParams>(json, pass);
    case Kernel::kSoftmax:
    case Kernel::kSoftcap:
      return write_params_as<LogitsParams>(json, pass);
    case Kernel::kMaskMap:
      return write_params_as<MaskMapParams>(json, pass);
  }
}

// The bytes of the bound parameter struct, for tools that run the plan elsewhere.
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

void write(JsonWriter& json, const Pass& pass) {
  json.open('{');
  write_fields(json, pass.spec);
  json.field("grid", pass.grid);
  if (pass.spec.sliced) json.field("slice", pass.slice);
  json.field("threads", pass.threads);
  json.field("threadgroup_bytes", pass.threadgroup_bytes);

  json.key("bindings");
  json.open('{');
  for (uint32_t i = 0; i < pass.binding_count; ++i) {
    json.field(name_of(pass.bindings[i].buffer), static_cast<uint32_t>(pass.bindings[i].slot));
  }
  json.field("params", static_cast<uint32_t>(kSlotParams));
  if (pass.spec.sliced) json.field("slice", static_cast<uint32_t>(kSlotSlice));
  json.close('}');

  json.key("params");
  json.open('{');
  write_params(json, pass);
  json.close('}');
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
  for (uint32_t i = 0; i < plan.pass_count; ++i) write(json, plan.passes[i]);
  json.close(']');

  const int64_t floats = plan.scratch_out_floats + plan.scratch_sum_floats;
  json.field("scratch_bytes", floats * int64_t{sizeof(float)} + plan.scratch_map_bytes);
  json.field("tuning", plan.tuning);
  json.close('}');
  return json.take();
}

std::string to_json(const std::vector<Compiled>& pipelines) {
  JsonWriter json;
  json.open('[');
  for (const Compiled& pipeline : pipelines) {
    json.open('{');
    write_fields(json, pipeline.spec);
    json.field("library_seconds", float(pipeline.library_seconds));
    json.field("pipeline_seconds", float(pipeline.pipeline_seconds));
    json.field("archived", pipeline.archived);
    json.close('}');
  }
  json.close(']');
  return json.take();
}

}  // namespace fattn
