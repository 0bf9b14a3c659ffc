// <metal_limits>, metal::array and metal::array_ref.
#pragma once

namespace metal {
// Has Apple's private name, which programs specialise. Other types have no limits, as in C++.
template <class T>
struct _numeric_limits_impl {
  static constexpr bool is_specialized = false;
  SOFTMETAL_INLINE static constexpr T min() { return T(); }
  SOFTMETAL_INLINE static constexpr T lowest() { return T(); }
  SOFTMETAL_INLINE static constexpr T max() { return T(); }
};
template <class T>
struct numeric_limits : _numeric_limits_impl<T> {};
#define SOFTMETAL_INTEGER_LIMITS(T, SIGNED, LOWEST, HIGHEST)                         \
  template <>                                                                        \
  struct _numeric_limits_impl<T> {                                                   \
    static constexpr bool is_specialized = true, is_integer = true, is_exact = true; \
    static constexpr bool is_signed = SIGNED, has_infinity = false;                  \
    static constexpr bool has_quiet_NaN = false;                                     \
    static constexpr int digits = sizeof(T) * 8 - SIGNED;                            \
    SOFTMETAL_INLINE static constexpr T min() { return LOWEST; }                     \
    SOFTMETAL_INLINE static constexpr T lowest() { return LOWEST; }                  \
    SOFTMETAL_INLINE static constexpr T max() { return HIGHEST; }                    \
  };
SOFTMETAL_INTEGER_LIMITS(bool, false, false, true)
SOFTMETAL_INTEGER_LIMITS(char, true, -128, 127)
SOFTMETAL_INTEGER_LIMITS(signed char, true, -128, 127)
SOFTMETAL_INTEGER_LIMITS(uchar, false, 0, 255)
SOFTMETAL_INTEGER_LIMITS(short, true, -32768, 32767)
SOFTMETAL_INTEGER_LIMITS(ushort, false, 0, 65535)
SOFTMETAL_INTEGER_LIMITS(int, true, -2147483647 - 1, 2147483647)
SOFTMETAL_INTEGER_LIMITS(uint, false, 0, 4294967295u)
SOFTMETAL_INTEGER_LIMITS(long, true, -9223372036854775807 - 1, 9223372036854775807)
SOFTMETAL_INTEGER_LIMITS(ulong, false, 0, 18446744073709551615u)
#undef SOFTMETAL_INTEGER_LIMITS
#define SOFTMETAL_FLOAT_LIMITS(T, DIGITS, MIN, MAX, EPSILON, DENORM)                       \
  template <>                                                                              \
  struct _numeric_limits_impl<T> {                                                         \
    static constexpr bool is_specialized = true, is_integer = false, is_exact = false;     \
    static constexpr bool is_signed = true, has_infinity = true, has_quiet_NaN = true;     \
    static constexpr int digits = DIGITS;                                                  \
    SOFTMETAL_INLINE static constexpr T min() { return MIN; }                              \
    SOFTMETAL_INLINE static constexpr T lowest() { return -MAX; }                          \
    SOFTMETAL_INLINE static constexpr T max() { return MAX; }                              \
    SOFTMETAL_INLINE static constexpr T epsilon() { return EPSILON; }                      \
    SOFTMETAL_INLINE static constexpr T denorm_min() { return DENORM; }                    \
    SOFTMETAL_INLINE static constexpr T infinity() { return (T)__builtin_inff(); }         \
    SOFTMETAL_INLINE static constexpr T quiet_NaN() { return (T)__builtin_nanf(""); }      \
    SOFTMETAL_INLINE static constexpr T signaling_NaN() { return (T)__builtin_nansf(""); } \
  };
SOFTMETAL_FLOAT_LIMITS(float, 24, 0x1p-126f, 0x1.fffffep127f, 0x1p-23f, 0x1p-149f)
SOFTMETAL_FLOAT_LIMITS(half, 11, (half)0x1p-14f, (half)65504.0f, (half)0x1p-10f, (half)0x1p-24f)
SOFTMETAL_FLOAT_LIMITS(bfloat, 8, (bfloat)0x1p-126f, (bfloat)0x1.fep127f, (bfloat)0x1p-7f, (bfloat)0x1p-133f)
#undef SOFTMETAL_FLOAT_LIMITS

template <class T, size_t N>
struct array {
  T elements_[N];
  SOFTMETAL_INLINE constexpr T& operator[](size_t i) { return elements_[i]; }
  SOFTMETAL_INLINE constexpr const T& operator[](size_t i) const { return elements_[i]; }
  SOFTMETAL_INLINE constexpr size_t size() const { return N; }
};
template <class T>
class array_ref {
  const T* elements_ = nullptr;
  size_t size_ = 0;

 public:
  array_ref() = default;
  SOFTMETAL_INLINE constexpr array_ref(const T* elements, size_t size) : elements_(elements), size_(size) {}
  template <size_t N>
  SOFTMETAL_INLINE constexpr array_ref(const array<T, N>& a) : elements_(a.elements_), size_(N) {}
  SOFTMETAL_INLINE constexpr const T& operator[](size_t i) const { return elements_[i]; }
  SOFTMETAL_INLINE constexpr size_t size() const { return size_; }
};
}  // namespace metal
