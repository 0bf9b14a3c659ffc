// Type traits.
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
using std::is_const_v;
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

}  // namespace metal

#include "../../msl/common/limits.h"
