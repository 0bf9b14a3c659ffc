// Storage formats of keys and values in a cache. A row is the head_dim elements of one token and head;
// torch_fattn/reference/kv_formats.py defines quantisation and its error bounds.
//
//   scales         storage                       their shape
//   None           [.., D]
//   Row            [.., D]                       float32 [..]
//   RowOrNone      [.., D]                       float32 [..], or no scales
//   Group (int4)   [.., D / 2]: the even         float16 [.., D / 32, 2], scale and minimum of 32 columns
//                  column in the low nibble
//
// FATTN_KV_FORMATS in formats.h lists the formats.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <variant>

#include "plan.h"

namespace fattn {

const char* name_of(KvFormat format);

// The quoted names of the quantised formats for which the predicate is true: "a", "b" or "c".
std::string formats_where(bool (*is_one)(KvFormat));

// "auto" chooses by the dtype of the cache; uint8 needs an explicit format.
std::variant<KvFormat, Refusal> kv_format_of(const char* op, std::string_view kv_format, DType cache_dtype);

// Refuses a head_dim that the format cannot store. `what` names the operand, such as "key".
std::optional<Refusal> check_format_dim(const char* op, const char* what, KvFormat format, int64_t head_dim);

// Elements of storage per row, and back.
inline int64_t stored_columns(KvFormat format, int64_t head_dim) {
  return head_dim / packed_elements(format);
}
inline int64_t head_dim_of(KvFormat format, int64_t columns) { return columns * packed_elements(format); }

// The dtype of a cache whose rows have the dtype `rows`.
DType storage_dtype(KvFormat format, DType rows);

inline bool takes_scales(KvFormat format) { return scales_kind(format) != kScalesNone; }
inline bool needs_scales(KvFormat format) {
  return takes_scales(format) && scales_kind(format) != kScalesRowOrNone;
}
inline DType scale_dtype(KvFormat format) {
  return scales_kind(format) == kScalesGroup ? DType::kFloat16 : DType::kFloat32;
}

}  // namespace fattn
