// The formats in which a cache stores keys and values, and what their names mean. A row is the head_dim
// elements of one token and head; quantising and its error bounds are defined in
// torch_fattn/reference/kv_formats.py.
//
//   format     storage                        scales
//   float      the dtype of the keys          none
//   int8       int8 [.., D]                   float32 [..]: value = q * scale
//   fp8_e4m3   uint8 [.., D]                  the same, or none (1.0)
//   int4       uint8 [.., D / 2]: the even    float16 [.., D / 32, 2], scale and minimum of 32 columns:
//              column in the low nibble       value = minimum + q * scale
#pragma once

#include <optional>
#include <string_view>
#include <variant>

#include "plan.h"

namespace fattn {

const char* name_of(KvFormat format);

// "auto" chooses by the dtype of the cache; uint8 needs an explicit format.
std::variant<KvFormat, Refusal> kv_format_of(const char* op, std::string_view kv_format, DType cache_dtype);

// Refuses a head_dim that the format cannot store. `what` names the operand, such as "key".
std::optional<Refusal> check_format_dim(const char* op, const char* what, KvFormat format, int64_t head_dim);

// Elements of storage per row, and back.
inline int64_t stored_columns(KvFormat format, int64_t head_dim) {
  return format == kKvInt4 ? head_dim / 2 : head_dim;
}
inline int64_t head_dim_of(KvFormat format, int64_t columns) {
  return format == kKvInt4 ? columns * 2 : columns;
}

// The dtype of a cache whose rows have the dtype `rows`.
inline DType storage_dtype(KvFormat format, DType rows) {
  if (format == kKvFloat) return rows;
  return format == kKvInt8 ? DType::kInt8 : DType::kUInt8;
}

inline bool takes_scales(KvFormat format) { return format != kKvFloat; }
inline bool needs_scales(KvFormat format) { return format == kKvInt8 || format == kKvInt4; }
inline bool has_row_scales(KvFormat format) { return format == kKvInt8 || format == kKvFp8E4M3; }
inline DType scale_dtype(KvFormat format) { return format == kKvInt4 ? DType::kFloat16 : DType::kFloat32; }

}  // namespace fattn
