// Quantises floats to the codes and scales of caches, bit-identical to torch_fattn/reference/kv_formats.py.
#pragma once

#include "../common/params.h"

using namespace metal;

namespace fattn {

FATTN_CONSTEXPR float kE4M3Max = largest_code(kKvFp8E4M3);
FATTN_CONSTEXPR float kInt4Max = largest_code(kKvInt4);
FATTN_CONSTEXPR float kHalfMax = 65504.0f;
FATTN_CONSTEXPR float kSmallestNormal = 1.17549435e-38f;   // 2^-126
FATTN_CONSTEXPR float kE4M3SmallestNormal = 1.0f / 64.0f;  // below it, e4m3 has the multiples of 2^-9

// Some GPUs flush subnormal numbers. Here they are always 0, and 0 is never -0.
inline float flushed(float x) { return fabs(x) < kSmallestNormal ? 0.0f : x; }

// The largest half that is not above x.
inline half rounded_down(float x) {
  const half nearest = half(x);
  if (float(nearest) <= x) {
    return nearest;
  }
  const ushort bits = as_type<ushort>(nearest);
  // Below both zeros is 0x8001.
  return as_type<half>(ushort(float(nearest) > 0.0f ? bits - 1 : (bits | 0x8000) + 1));
}

// The smallest half that is not below x >= 0.
inline half rounded_up(float x) {
  const half nearest = half(x);
  return float(nearest) >= x ? nearest : as_type<half>(ushort(as_type<ushort>(nearest) + 1));
}

// Rounds to e4m3, ties to even, and saturates. The exponent bias of e4m3 is 7, of float 127.
inline int e4m3_of(float x) {
  if (isnan(x)) {
    return 0x7f;
  }
  const float size = fmin(fabs(x), kE4M3Max);
  int code;
  if (size < kE4M3SmallestNormal) {
    code = int(rint(size * 512.0f));
  } else {
    const uint bits = as_type<uint>(size);
    code = int((bits + 0x7ffff + ((bits >> 20) & 1)) >> 20) - ((127 - 7) << 3);
  }
  return x < 0.0f && code != 0 ? code | 0x80 : code;
}

}  // namespace fattn
