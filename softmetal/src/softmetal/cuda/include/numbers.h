// half and bfloat: 16-bit storage, arithmetic rounded after every operation as in Metal, exact conversion to
// float.
#pragma once

#include <cstdint>
#include <type_traits>

#define SOFTMETAL_INLINE __device__ __attribute__((always_inline)) inline
#define SOFTMETAL_UNROLL _Pragma("unroll")

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;

namespace softmetal {

template <typename T>
concept Arithmetic = std::is_arithmetic_v<T>;

// Conversions at compile time, without instructions: round to nearest, ties to even.
SOFTMETAL_INLINE constexpr uint32_t float_bits(float x) { return __builtin_bit_cast(uint32_t, x); }

SOFTMETAL_INLINE constexpr ushort constant_half(float x) {
  const uint32_t bits = float_bits(x);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return ushort(sign | 0x7e00u);
  if (magnitude >= 0x47800000u) return ushort(sign | 0x7c00u);
  const int exponent = int(magnitude >> 23) - 112;
  const uint32_t mantissa = (magnitude & 0x7fffffu) | 0x800000u;
  const int shift = exponent > 0 ? 13 : 14 - exponent;
  if (shift > 24) return ushort(sign);
  uint32_t result = exponent > 0 ? (magnitude >> 13) - (112u << 10) : mantissa >> shift;
  const uint32_t rest = mantissa & ((1u << shift) - 1);
  const uint32_t tie = 1u << (shift - 1);
  result += rest > tie || (rest == tie && (result & 1));
  return ushort(sign | result);
}

SOFTMETAL_INLINE constexpr float constant_half_value(ushort bits) {
  const uint32_t sign = uint32_t(bits & 0x8000u) << 16;
  const uint32_t magnitude = bits & 0x7fffu;
  if (magnitude >= 0x7c00u) return __builtin_bit_cast(float, sign | (magnitude << 13) | 0x7f800000u);
  if (magnitude < 0x400u) return (sign ? -1.0f : 1.0f) * float(magnitude) * 0x1p-24f;
  return __builtin_bit_cast(float, sign | ((magnitude << 13) + 0x38000000u));
}

SOFTMETAL_INLINE constexpr ushort constant_bfloat(float x) {
  const uint32_t bits = float_bits(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return ushort((bits >> 16) | 0x40u);
  return ushort((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

SOFTMETAL_INLINE ushort half_from_float(float x) {
  ushort bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}

SOFTMETAL_INLINE float float_from_half(ushort bits) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
  return x;
}

SOFTMETAL_INLINE ushort bfloat_from_float(float x) {
  ushort bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}

}  // namespace softmetal

struct bfloat;

struct half {
  ushort bits;

  half() = default;
  template <softmetal::Arithmetic T>
  SOFTMETAL_INLINE constexpr half(T x)
      : bits(__builtin_is_constant_evaluated() ? softmetal::constant_half(float(x))
                                               : softmetal::half_from_float(float(x))) {}
  SOFTMETAL_INLINE constexpr explicit half(bfloat x);
  SOFTMETAL_INLINE constexpr operator float() const {
    return __builtin_is_constant_evaluated() ? softmetal::constant_half_value(bits)
                                             : softmetal::float_from_half(bits);
  }
};

struct bfloat {
  ushort bits;

  bfloat() = default;
  template <softmetal::Arithmetic T>
  SOFTMETAL_INLINE constexpr bfloat(T x)
      : bits(__builtin_is_constant_evaluated() ? softmetal::constant_bfloat(float(x))
                                               : softmetal::bfloat_from_float(float(x))) {}
  SOFTMETAL_INLINE constexpr explicit bfloat(half x) : bfloat(float(x)) {}
  SOFTMETAL_INLINE constexpr operator float() const {
    return __builtin_bit_cast(float, uint32_t(bits) << 16);
  }
};

SOFTMETAL_INLINE constexpr half::half(bfloat x) : half(float(x)) {}

namespace softmetal {

template <typename T>
concept Short = std::is_same_v<T, half> || std::is_same_v<T, bfloat>;

template <typename T>
concept Scalar = Arithmetic<T> || Short<T>;

}  // namespace softmetal

// float has more than twice the bits of either type, so rounding its result again gives the correctly rounded
// 16-bit result. Both operands have the same type: half * float is float * float.
#define SOFTMETAL_SHORT_OPERATOR(op)                         \
  template <softmetal::Short T, softmetal::Short U>          \
    requires std::is_same_v<T, U>                            \
  SOFTMETAL_INLINE constexpr T operator op(T a, U b) {       \
    return T(float(a) op float(b));                          \
  }                                                          \
  template <softmetal::Short T, softmetal::Scalar U>         \
  SOFTMETAL_INLINE constexpr T& operator op##=(T & a, U b) { \
    return a = T(float(a) op float(b));                      \
  }
SOFTMETAL_SHORT_OPERATOR(+)
SOFTMETAL_SHORT_OPERATOR(-)
SOFTMETAL_SHORT_OPERATOR(*)
SOFTMETAL_SHORT_OPERATOR(/)
#undef SOFTMETAL_SHORT_OPERATOR

#define SOFTMETAL_SHORT_COMPARISON(op)                    \
  template <softmetal::Short T, softmetal::Short U>       \
    requires std::is_same_v<T, U>                         \
  SOFTMETAL_INLINE constexpr bool operator op(T a, U b) { \
    return float(a) op float(b);                          \
  }
SOFTMETAL_SHORT_COMPARISON(<)
SOFTMETAL_SHORT_COMPARISON(<=)
SOFTMETAL_SHORT_COMPARISON(>)
SOFTMETAL_SHORT_COMPARISON(>=)
SOFTMETAL_SHORT_COMPARISON(==)
#undef SOFTMETAL_SHORT_COMPARISON

template <softmetal::Short T>
SOFTMETAL_INLINE constexpr T operator-(T a) {
  T negative = a;
  negative.bits = ushort(a.bits ^ 0x8000u);
  return negative;
}
