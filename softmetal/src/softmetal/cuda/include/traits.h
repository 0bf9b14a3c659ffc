// Type traits and numeric limits.
#pragma once

#include "vectors.h"

namespace metal {

using std::add_const_t;
using std::bool_constant;
using std::conditional;
using std::conditional_t;
using std::decay_t;
using std::enable_if;
using std::enable_if_t;
using std::false_type;
using std::integral_constant;
using std::is_const;
using std::is_integral;
using std::is_integral_v;
using std::is_pointer;
using std::is_same;
using std::is_same_v;
using std::is_signed_v;
using std::is_unsigned_v;
using std::make_signed_t;
using std::make_unsigned_t;
using std::remove_const_t;
using std::remove_cv;
using std::remove_cv_t;
using std::remove_reference_t;
using std::true_type;

template <typename T>
using remove_addrspace_t = T;
template <typename T>
struct is_floating_point : bool_constant<std::is_same_v<T, float> || softmetal::Short<T>> {};
template <typename T>
constexpr bool is_floating_point_v = is_floating_point<T>::value;
template <typename T>
constexpr bool is_arithmetic_v = softmetal::Scalar<T>;
template <typename T>
constexpr bool is_scalar_v = softmetal::Scalar<T>;

template <typename T>
SOFTMETAL_INLINE T&& declval();

template <typename T, size_t N>
struct array {
  T elements[N];
  SOFTMETAL_INLINE constexpr T& operator[](size_t i) { return elements[i]; }
  SOFTMETAL_INLINE constexpr const T& operator[](size_t i) const { return elements[i]; }
  SOFTMETAL_INLINE constexpr size_t size() const { return N; }
};

template <typename T>
struct numeric_limits {  // integers
  static constexpr bool is_signed = T(-1) < T(0);
  SOFTMETAL_INLINE static constexpr T min() { return is_signed ? T(T(1) << (8 * sizeof(T) - 1)) : T(0); }
  SOFTMETAL_INLINE static constexpr T max() { return T(~min()); }
  SOFTMETAL_INLINE static constexpr T lowest() { return min(); }
};

template <>
struct numeric_limits<float> {
  SOFTMETAL_INLINE static constexpr float min() { return 0x1p-126f; }
  SOFTMETAL_INLINE static constexpr float max() { return 0x1.fffffep127f; }
  SOFTMETAL_INLINE static constexpr float lowest() { return -max(); }
  SOFTMETAL_INLINE static constexpr float epsilon() { return 0x1p-23f; }
  SOFTMETAL_INLINE static constexpr float infinity() { return __builtin_inff(); }
  SOFTMETAL_INLINE static constexpr float quiet_NaN() { return __builtin_nanf(""); }
};

template <>
struct numeric_limits<half> {
  SOFTMETAL_INLINE static constexpr half min() { return half(0x1p-14f); }
  SOFTMETAL_INLINE static constexpr half max() { return half(65504.0f); }
  SOFTMETAL_INLINE static constexpr half lowest() { return half(-65504.0f); }
  SOFTMETAL_INLINE static constexpr half epsilon() { return half(0x1p-10f); }
  SOFTMETAL_INLINE static constexpr half infinity() { return half(__builtin_inff()); }
  SOFTMETAL_INLINE static constexpr half quiet_NaN() { return half(__builtin_nanf("")); }
};

template <>
struct numeric_limits<bfloat> {
  SOFTMETAL_INLINE static constexpr bfloat min() { return bfloat(0x1p-126f); }
  SOFTMETAL_INLINE static constexpr bfloat max() { return bfloat(0x1.fep127f); }
  SOFTMETAL_INLINE static constexpr bfloat lowest() { return bfloat(-0x1.fep127f); }
  SOFTMETAL_INLINE static constexpr bfloat epsilon() { return bfloat(0x1p-7f); }
  SOFTMETAL_INLINE static constexpr bfloat infinity() { return bfloat(__builtin_inff()); }
  SOFTMETAL_INLINE static constexpr bfloat quiet_NaN() { return bfloat(__builtin_nanf("")); }
};

}  // namespace metal
