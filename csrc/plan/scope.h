// Which calls a row of a tuning table is for. Rows name only what they limit.
#pragma once

#include <algorithm>
#include <cstdint>

#include "device.h"
#include "problem.h"

namespace fattn {

inline constexpr int kAnyFamily = 0;
inline constexpr uint16_t kAnyDim = 0xffff;

// A dtype as a bit of the sets below.
constexpr uint8_t set_of(DType dtype) { return uint8_t(1u << unsigned(dtype)); }
inline constexpr uint8_t kFloat32s = set_of(DType::kFloat32);
inline constexpr uint8_t kFloat16s = set_of(DType::kFloat16);
inline constexpr uint8_t kBFloat16s = set_of(DType::kBFloat16);
inline constexpr uint8_t k16Bit = kFloat16s | kBFloat16s;
inline constexpr uint8_t kAnyDType = 0xff;

// The same for formats of caches.
inline constexpr uint8_t kInt8AndFp8 = 1 << kKvInt8 | 1 << kKvFp8E4M3;
inline constexpr uint8_t kInt4s = 1 << kKvInt4;
inline constexpr uint8_t kAnyFormat = 0xff;
inline constexpr uint8_t kQuantised = kAnyFormat & ~(1 << kKvFloat);

struct Scope {
  int min_family = kAnyFamily;   // Apple GPU family
  uint8_t dtypes = kAnyDType;    // of the operands of products, or of the query
  uint8_t formats = kAnyFormat;  // of the cache
  uint16_t max_dim = kAnyDim;    // the larger of head_dim and value_dim
  bool registers = false;        // tables for matrix units: scores stay in registers
  const char* source = "";       // of the row's sizes

  bool has(const DeviceFacts& device, const Problem& p, DType dtype) const {
    return device.family >= min_family && (dtypes & set_of(dtype)) != 0 &&
           (formats & (1 << p.kv_format)) != 0 && std::max(p.head_dim, p.value_dim) <= max_dim;
  }
};

}  // namespace fattn
