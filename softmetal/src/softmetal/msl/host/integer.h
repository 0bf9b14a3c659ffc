// <metal_integer>, and the common functions on integers: abs, min, max, clamp.
#pragma once
#pragma clang system_header
#include "vectors.h"

namespace softmetal {
// a * b + c, limited to T. The widest product and sum fit 128 bits.
template <class T>
SOFTMETAL_INLINE constexpr T saturated(T a, T b, T c) {
  using Wide = conditional_t<is_signed_v<T>, __int128, unsigned __int128>;
  const Wide sum = Wide(a) * Wide(b) + Wide(c);
  const Wide low = numeric_limits<T>::min(), high = numeric_limits<T>::max();
  return sum < low ? T(low) : sum > high ? T(high) : T(sum);
}
}  // namespace softmetal

namespace metal {
// Overloads rather than templates: mixed argument types are ambiguous, as in Metal.
#define SOFTMETAL_INTEGER(T)                                                                               \
  SOFTMETAL_INLINE constexpr T min(T a, T b) { return b < a ? b : a; }                                     \
  SOFTMETAL_INLINE constexpr T max(T a, T b) { return a < b ? b : a; }                                     \
  SOFTMETAL_INLINE constexpr T clamp(T x, T low, T high) { return min(max(x, low), high); }                \
  SOFTMETAL_INLINE constexpr T min3(T a, T b, T c) { return min(min(a, b), c); }                           \
  SOFTMETAL_INLINE constexpr T max3(T a, T b, T c) { return max(max(a, b), c); }                           \
  SOFTMETAL_INLINE constexpr T median3(T a, T b, T c) { return max(min(a, b), min(max(a, b), c)); }        \
  /* The least integer has no positive counterpart and is unchanged. */                                    \
  SOFTMETAL_INLINE constexpr T abs(T x) {                                                                  \
    return x < 0 ? T(make_unsigned_t<T>(0) - make_unsigned_t<T>(x)) : x;                                   \
  }                                                                                                        \
  SOFTMETAL_INLINE constexpr make_unsigned_t<T> absdiff(T a, T b) {                                        \
    using U = make_unsigned_t<T>;                                                                          \
    return a < b ? U(U(b) - U(a)) : U(U(a) - U(b));                                                        \
  }                                                                                                        \
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
  SOFTMETAL_INLINE constexpr T mulhi(T a, T b) {                                                           \
    using Wide = conditional_t<is_signed_v<T>, __int128, unsigned __int128>;                               \
    return T((Wide(a) * Wide(b)) >> (sizeof(T) * 8));                                                      \
  }                                                                                                        \
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
  SOFTMETAL_INLINE constexpr T madhi(T a, T b, T c) {                                                      \
    using U = make_unsigned_t<T>;                                                                          \
    return T(U(U(mulhi(a, b)) + U(c)));                                                                    \
  }                                                                                                        \
  SOFTMETAL_INLINE constexpr T madsat(T a, T b, T c) { return softmetal::saturated<T>(a, b, c); }          \
  SOFTMETAL_INLINE constexpr T extract_bits(T x, uint offset, uint bits) {                                 \
    constexpr uint width = sizeof(T) * 8;                                                                  \
    if (bits == 0 || offset >= width) return T(0);                                                         \
    const uint count = bits > width - offset ? width - offset : bits;                                      \
    /* Shift up, then back down with the sign if T is signed. */                                           \
    return T(T(make_unsigned_t<T>(make_unsigned_t<T>(x) << (width - count - offset))) >> (width - count)); \
  }                                                                                                        \
  SOFTMETAL_INLINE constexpr T insert_bits(T base, T insert, uint offset, uint bits) {                     \
    using U = make_unsigned_t<T>;                                                                          \
    constexpr uint width = sizeof(T) * 8;                                                                  \
    if (bits == 0 || offset >= width) return base;                                                         \
    const U mask = U(U(bits >= width ? U(~U(0)) : U((U(1) << bits) - 1)) << offset);                       \
    return T(U((U(base) & U(~mask)) | (U(U(insert) << offset) & mask)));                                   \
  }
SOFTMETAL_FOR_EACH_INTEGER(SOFTMETAL_INTEGER)
#undef SOFTMETAL_INTEGER

// The low 32 bits of the product of the low 24 bits.
SOFTMETAL_INLINE constexpr uint mul24(uint a, uint b) { return (a & 0xffffffu) * (b & 0xffffffu); }
SOFTMETAL_INLINE constexpr int mul24(int a, int b) {
  return int(uint(int(uint(a) << 8) >> 8) * uint(int(uint(b) << 8) >> 8));
}
SOFTMETAL_INLINE constexpr uint mad24(uint a, uint b, uint c) { return mul24(a, b) + c; }
SOFTMETAL_INLINE constexpr int mad24(int a, int b, int c) { return int(uint(mul24(a, b)) + uint(c)); }

// The same functions, element by element.
template <class T>
using if_integer = enable_if_t<is_integral_v<T>, int>;
#define SOFTMETAL_BY_ELEMENT1(NAME, RESULT)           \
  template <class T, int N, if_integer<T> = 0>        \
  SOFTMETAL_INLINE vec<RESULT, N> NAME(vec<T, N> a) { \
    vec<RESULT, N> r;                                 \
    for (int i = 0; i < N; ++i) r[i] = NAME(T(a[i])); \
    return r;                                         \
  }
#define SOFTMETAL_BY_ELEMENT2(NAME, RESULT)                                              \
  template <class T, int N, if_integer<T> = 0>                                           \
  SOFTMETAL_INLINE vec<RESULT, N> NAME(vec<T, N> a, softmetal::undeduced<vec<T, N>> b) { \
    vec<RESULT, N> r;                                                                    \
    for (int i = 0; i < N; ++i) r[i] = NAME(T(a[i]), T(b[i]));                           \
    return r;                                                                            \
  }
#define SOFTMETAL_BY_ELEMENT3(NAME)                                               \
  template <class T, int N, if_integer<T> = 0>                                    \
  SOFTMETAL_INLINE vec<T, N> NAME(vec<T, N> a, softmetal::undeduced<vec<T, N>> b, \
                                  softmetal::undeduced<vec<T, N>> c) {            \
    vec<T, N> r;                                                                  \
    for (int i = 0; i < N; ++i) r[i] = NAME(T(a[i]), T(b[i]), T(c[i]));           \
    return r;                                                                     \
  }
SOFTMETAL_BY_ELEMENT1(abs, T)
SOFTMETAL_BY_ELEMENT1(popcount, T)
SOFTMETAL_BY_ELEMENT1(clz, T)
SOFTMETAL_BY_ELEMENT1(ctz, T)
SOFTMETAL_BY_ELEMENT1(reverse_bits, T)
SOFTMETAL_BY_ELEMENT2(min, T)
SOFTMETAL_BY_ELEMENT2(max, T)
SOFTMETAL_BY_ELEMENT2(absdiff, make_unsigned_t<T>)
SOFTMETAL_BY_ELEMENT2(addsat, T)
SOFTMETAL_BY_ELEMENT2(subsat, T)
SOFTMETAL_BY_ELEMENT2(hadd, T)
SOFTMETAL_BY_ELEMENT2(rhadd, T)
SOFTMETAL_BY_ELEMENT2(mulhi, T)
SOFTMETAL_BY_ELEMENT2(rotate, T)
SOFTMETAL_BY_ELEMENT2(mul24, T)
SOFTMETAL_BY_ELEMENT3(clamp)
SOFTMETAL_BY_ELEMENT3(min3)
SOFTMETAL_BY_ELEMENT3(max3)
SOFTMETAL_BY_ELEMENT3(median3)
SOFTMETAL_BY_ELEMENT3(madhi)
SOFTMETAL_BY_ELEMENT3(madsat)
SOFTMETAL_BY_ELEMENT3(mad24)
#undef SOFTMETAL_BY_ELEMENT1
#undef SOFTMETAL_BY_ELEMENT2
#undef SOFTMETAL_BY_ELEMENT3
template <class T, int N, if_integer<T> = 0>
SOFTMETAL_INLINE vec<T, N> extract_bits(vec<T, N> x, uint offset, uint bits) {
  vec<T, N> r;
  for (int i = 0; i < N; ++i) r[i] = extract_bits(T(x[i]), offset, bits);
  return r;
}
template <class T, int N, if_integer<T> = 0>
SOFTMETAL_INLINE vec<T, N> insert_bits(vec<T, N> base, vec<T, N> insert, uint offset, uint bits) {
  vec<T, N> r;
  for (int i = 0; i < N; ++i) r[i] = insert_bits(T(base[i]), T(insert[i]), offset, bits);
  return r;
}
}  // namespace metal
