// <metal_pack>: normalised integers in one word, with the first element in the lowest bits (565: in the
// highest).
#pragma once
#pragma clang system_header
#include "math.h"

namespace softmetal {
SOFTMETAL_INLINE float unorm(uint word, int shift, int bits) {
  const uint largest = (1u << bits) - 1;
  return float(word >> shift & largest) / float(largest);
}
SOFTMETAL_INLINE uint to_unorm(float x, int shift, int bits) {
  const float largest = float((1u << bits) - 1);
  return uint(__builtin_rintf(__builtin_fminf(__builtin_fmaxf(x, 0.0f), 1.0f) * largest)) << shift;
}
SOFTMETAL_INLINE float snorm(uint word, int shift, int bits) {
  const int value = int(word << (32 - bits - shift)) >> (32 - bits);
  return __builtin_fmaxf(float(value) / float((1 << (bits - 1)) - 1), -1.0f);
}
SOFTMETAL_INLINE uint to_snorm(float x, int shift, int bits) {
  const float largest = float((1 << (bits - 1)) - 1);
  const int value = int(__builtin_rintf(__builtin_fminf(__builtin_fmaxf(x, -1.0f), 1.0f) * largest));
  return (uint(value) & ((1u << bits) - 1)) << shift;
}
SOFTMETAL_INLINE float linear(float srgb) {
  return srgb <= 0.04045f ? srgb / 12.92f : __builtin_powf((srgb + 0.055f) / 1.055f, 2.4f);
}
SOFTMETAL_INLINE float nonlinear(float x) {
  return x < 0.0031308f ? x * 12.92f : 1.055f * __builtin_powf(x, 1.0f / 2.4f) - 0.055f;
}
}  // namespace softmetal

namespace metal {
#define SOFTMETAL_PACK(T)                                                                               \
  SOFTMETAL_INLINE vec<T, 4> unpack_unorm4x8_to_##T(uint x) {                                           \
    using namespace softmetal;                                                                          \
    return vec<T, 4>{(T)unorm(x, 0, 8), (T)unorm(x, 8, 8), (T)unorm(x, 16, 8), (T)unorm(x, 24, 8)};     \
  }                                                                                                     \
  SOFTMETAL_INLINE vec<T, 4> unpack_snorm4x8_to_##T(uint x) {                                           \
    using namespace softmetal;                                                                          \
    return vec<T, 4>{(T)snorm(x, 0, 8), (T)snorm(x, 8, 8), (T)snorm(x, 16, 8), (T)snorm(x, 24, 8)};     \
  }                                                                                                     \
  SOFTMETAL_INLINE vec<T, 4> unpack_unorm4x8_srgb_to_##T(uint x) {                                      \
    using namespace softmetal;                                                                          \
    return vec<T, 4>{(T)linear(unorm(x, 0, 8)), (T)linear(unorm(x, 8, 8)), (T)linear(unorm(x, 16, 8)),  \
                     (T)unorm(x, 24, 8)};                                                               \
  }                                                                                                     \
  SOFTMETAL_INLINE vec<T, 2> unpack_unorm2x16_to_##T(uint x) {                                          \
    return vec<T, 2>{(T)softmetal::unorm(x, 0, 16), (T)softmetal::unorm(x, 16, 16)};                    \
  }                                                                                                     \
  SOFTMETAL_INLINE vec<T, 2> unpack_snorm2x16_to_##T(uint x) {                                          \
    return vec<T, 2>{(T)softmetal::snorm(x, 0, 16), (T)softmetal::snorm(x, 16, 16)};                    \
  }                                                                                                     \
  SOFTMETAL_INLINE vec<T, 4> unpack_unorm10a2_to_##T(uint x) {                                          \
    using namespace softmetal;                                                                          \
    return vec<T, 4>{(T)unorm(x, 0, 10), (T)unorm(x, 10, 10), (T)unorm(x, 20, 10), (T)unorm(x, 30, 2)}; \
  }                                                                                                     \
  SOFTMETAL_INLINE vec<T, 3> unpack_unorm565_to_##T(ushort x) {                                         \
    return vec<T, 3>{(T)softmetal::unorm(x, 11, 5), (T)softmetal::unorm(x, 5, 6),                       \
                     (T)softmetal::unorm(x, 0, 5)};                                                     \
  }                                                                                                     \
  SOFTMETAL_INLINE uint pack_##T##_to_unorm4x8(vec<T, 4> v) {                                           \
    using namespace softmetal;                                                                          \
    return to_unorm(v.x, 0, 8) | to_unorm(v.y, 8, 8) | to_unorm(v.z, 16, 8) | to_unorm(v.w, 24, 8);     \
  }                                                                                                     \
  SOFTMETAL_INLINE uint pack_##T##_to_snorm4x8(vec<T, 4> v) {                                           \
    using namespace softmetal;                                                                          \
    return to_snorm(v.x, 0, 8) | to_snorm(v.y, 8, 8) | to_snorm(v.z, 16, 8) | to_snorm(v.w, 24, 8);     \
  }                                                                                                     \
  SOFTMETAL_INLINE uint pack_##T##_to_srgb_unorm4x8(vec<T, 4> v) {                                      \
    using namespace softmetal;                                                                          \
    return to_unorm(nonlinear(v.x), 0, 8) | to_unorm(nonlinear(v.y), 8, 8) |                            \
           to_unorm(nonlinear(v.z), 16, 8) | to_unorm(v.w, 24, 8);                                      \
  }                                                                                                     \
  SOFTMETAL_INLINE uint pack_##T##_to_unorm2x16(vec<T, 2> v) {                                          \
    return softmetal::to_unorm(v.x, 0, 16) | softmetal::to_unorm(v.y, 16, 16);                          \
  }                                                                                                     \
  SOFTMETAL_INLINE uint pack_##T##_to_snorm2x16(vec<T, 2> v) {                                          \
    return softmetal::to_snorm(v.x, 0, 16) | softmetal::to_snorm(v.y, 16, 16);                          \
  }                                                                                                     \
  SOFTMETAL_INLINE uint pack_##T##_to_unorm10a2(vec<T, 4> v) {                                          \
    using namespace softmetal;                                                                          \
    return to_unorm(v.x, 0, 10) | to_unorm(v.y, 10, 10) | to_unorm(v.z, 20, 10) | to_unorm(v.w, 30, 2); \
  }                                                                                                     \
  SOFTMETAL_INLINE ushort pack_##T##_to_unorm565(vec<T, 3> v) {                                         \
    return ushort(softmetal::to_unorm(v.x, 11, 5) | softmetal::to_unorm(v.y, 5, 6) |                    \
                  softmetal::to_unorm(v.z, 0, 5));                                                      \
  }
SOFTMETAL_PACK(half)
SOFTMETAL_PACK(float)
#undef SOFTMETAL_PACK
}  // namespace metal
