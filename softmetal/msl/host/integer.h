// <metal_integer>, and the common functions on integers: abs, min, max, clamp.
#pragma once
#pragma clang system_header
#include "vectors.h"

namespace metal {
// Overloads, not templates: mixed argument types are as ambiguous here as they are in Metal.
#define SOFTMETAL_INTEGER(T)                                                                               \
  SOFTMETAL_INLINE constexpr T min(T a, T b) { return b < a ? b : a; }                                     \
  SOFTMETAL_INLINE constexpr T max(T a, T b) { return a < b ? b : a; }                                     \
  SOFTMETAL_INLINE constexpr T clamp(T x, T low, T high) { return min(max(x, low), high); }                \
  SOFTMETAL_INLINE constexpr T min3(T a, T b, T c) { return min(min(a, b), c); }                           \
  SOFTMETAL_INLINE constexpr T max3(T a, T b, T c) { return max(max(a, b), c); }                           \
  SOFTMETAL_INLINE constexpr T median3(T a, T b, T c) { return max(min(a, b), min(max(a, b), c)); }        \
  SOFTMETAL_INLINE constexpr T abs(T x) { return x < 0 ? T(-x) : x; }                                      \
  SOFTMETAL_INLINE constexpr T absdiff(T a, T b) { return a < b ? T(b - a) : T(a - b); }                   \
  SOFTMETAL_INLINE constexpr T popcount(T x) {                                                             \
    return T(__builtin_popcountl(ulong(make_unsigned_t<T>(x))));                                           \
  }                                                                                                        \
  SOFTMETAL_INLINE constexpr T clz(T x) {                                                                  \
    return x == 0 ? T(sizeof(T) * 8)                                                                       \
                  : T(__builtin_clzl(ulong(make_unsigned_t<T>(x))) - (64 - int(sizeof(T)) * 8));           \
  }                                                                                                        \
  SOFTMETAL_INLINE constexpr T ctz(T x) {                                                                  \
    return x == 0 ? T(sizeof(T) * 8) : T(__builtin_ctzl(ulong(make_unsigned_t<T>(x))));                    \
  }                                                                                                        \
  SOFTMETAL_INLINE constexpr T rotate(T v, T n) {                                                          \
    using U = make_unsigned_t<T>;                                                                          \
    constexpr int bits = int(sizeof(T)) * 8;                                                               \
    const int k = int(U(n)) & (bits - 1);                                                                  \
    return k == 0 ? v : T(U(U(v) << k) | U(U(v) >> (bits - k)));                                           \
  }                                                                                                        \
  SOFTMETAL_INLINE constexpr T reverse_bits(T v) {                                                         \
    return T(                                                                                              \
        make_unsigned_t<T>(__builtin_bitreverse64(ulong(make_unsigned_t<T>(v))) >> (64 - sizeof(T) * 8))); \
  }                                                                                                        \
  SOFTMETAL_INLINE constexpr T mulhi(T a, T b) { return T((__int128(a) * b) >> (sizeof(T) * 8)); }         \
  SOFTMETAL_INLINE constexpr T hadd(T a, T b) { return T((__int128(a) + b) >> 1); }                        \
  SOFTMETAL_INLINE constexpr T rhadd(T a, T b) { return T((__int128(a) + b + 1) >> 1); }                   \
  SOFTMETAL_INLINE constexpr T addsat(T a, T b) {                                                          \
    const __int128 sum = __int128(a) + b;                                                                  \
    return sum < numeric_limits<T>::min()   ? numeric_limits<T>::min()                                     \
           : sum > numeric_limits<T>::max() ? numeric_limits<T>::max()                                     \
                                            : T(sum);                                                      \
  }                                                                                                        \
  SOFTMETAL_INLINE constexpr T subsat(T a, T b) {                                                          \
    const __int128 sum = __int128(a) - b;                                                                  \
    return sum < numeric_limits<T>::min()   ? numeric_limits<T>::min()                                     \
           : sum > numeric_limits<T>::max() ? numeric_limits<T>::max()                                     \
                                            : T(sum);                                                      \
  }                                                                                                        \
  SOFTMETAL_INLINE constexpr T extract_bits(T x, uint offset, uint bits) {                                 \
    constexpr uint width = sizeof(T) * 8;                                                                  \
    return bits == 0 ? T(0) : T(T(make_unsigned_t<T>(x) << (width - bits - offset)) >> (width - bits));    \
  }
SOFTMETAL_INTEGER(char)
SOFTMETAL_INTEGER(uchar)
SOFTMETAL_INTEGER(short)
SOFTMETAL_INTEGER(ushort)
SOFTMETAL_INTEGER(int)
SOFTMETAL_INTEGER(uint)
SOFTMETAL_INTEGER(long)
SOFTMETAL_INTEGER(ulong)
#undef SOFTMETAL_INTEGER

SOFTMETAL_INLINE constexpr int mul24(int a, int b) { return a * b; }
SOFTMETAL_INLINE constexpr uint mul24(uint a, uint b) { return a * b; }
SOFTMETAL_INLINE constexpr int mad24(int a, int b, int c) { return a * b + c; }
SOFTMETAL_INLINE constexpr uint mad24(uint a, uint b, uint c) { return a * b + c; }

#define SOFTMETAL_VECTOR_UNARY(NAME)                                \
  template <class T, int N, enable_if_t<is_integral_v<T>, int> = 0> \
  SOFTMETAL_INLINE vec<T, N> NAME(vec<T, N> x) {                    \
    vec<T, N> r;                                                    \
    for (int i = 0; i < N; ++i) r[i] = NAME(T(x[i]));               \
    return r;                                                       \
  }
SOFTMETAL_VECTOR_UNARY(popcount)
SOFTMETAL_VECTOR_UNARY(clz)
SOFTMETAL_VECTOR_UNARY(ctz)
SOFTMETAL_VECTOR_UNARY(reverse_bits)
#undef SOFTMETAL_VECTOR_UNARY
}  // namespace metal
