// The formats of caches, as a list for host and kernels. Like params.h, this file must compile as C++20 and
// as MSL.
#pragma once

namespace fattn {

// How a cache stores rows of keys and values: see plan/kv_format.h. Recorded plans refer to a format by its
// number, so numbers are never reused.
// X(number, id, name, storage dtype, elements per stored number, scales, largest code)
#define FATTN_KV_FORMATS(X)                                                            \
  X(0, Float, "float", Rows, 1, None, 0) /* not quantised: in the dtype of the rows */ \
  X(1, Int8, "int8", Int8, 1, Row, 127)                                                \
  X(2, Fp8E4M3, "fp8_e4m3", UInt8, 1, RowOrNone, 448)                                  \
  X(3, Int4, "int4", UInt8, 2, Group, 15)

#define FATTN_ENUMERATOR(number, id, ...) kKv##id = number,
enum KvFormat { FATTN_KV_FORMATS(FATTN_ENUMERATOR) };
#undef FATTN_ENUMERATOR

enum KvScales {
  kScalesNone,
  kScalesRow,        // float32 per row: value = q * scale
  kScalesRowOrNone,  // the same, or none (1.0)
  kScalesGroup,      // float16 scale and minimum per kInt4Group columns: value = minimum + q * scale
};

#define FATTN_CASE(number, id, name, storage, packed, scales, largest) format == number ? packed:
constexpr int packed_elements(int format) { return FATTN_KV_FORMATS(FATTN_CASE) 0; }
#undef FATTN_CASE
#define FATTN_CASE(number, id, name, storage, packed, scales, largest) format == number ? kScales##scales:
constexpr KvScales scales_kind(int format) { return FATTN_KV_FORMATS(FATTN_CASE) kScalesNone; }
#undef FATTN_CASE
#define FATTN_CASE(number, id, name, storage, packed, scales, largest) format == number ? largest:
constexpr int largest_code(int format) { return FATTN_KV_FORMATS(FATTN_CASE) 0; }
#undef FATTN_CASE
constexpr bool has_row_scales(int format) {
  return scales_kind(format) == kScalesRow || scales_kind(format) == kScalesRowOrNone;
}

}  // namespace fattn
