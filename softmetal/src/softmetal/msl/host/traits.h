// <metal_type_traits>, <metal_limits>, and the traits of vectors and pointers that the other headers use.
//
// is_empty, void_t and make_void are omitted on purpose: Apple does not have them, and programs define them
// in namespace metal.
#pragma once
#pragma clang system_header
#include "types.h"

namespace metal {
template <class T, T V>
struct integral_constant {
  static constexpr T value = V;
  using value_type = T;
  using type = integral_constant;
  SOFTMETAL_INLINE constexpr operator T() const { return V; }
  SOFTMETAL_INLINE constexpr T operator()() const { return V; }
};
template <bool B>
using bool_constant = integral_constant<bool, B>;
using true_type = bool_constant<true>;
using false_type = bool_constant<false>;

template <bool B, class T = void>
struct enable_if {};
template <class T>
struct enable_if<true, T> {
  using type = T;
};
template <bool B, class T = void>
using enable_if_t = typename enable_if<B, T>::type;

template <bool B, class T, class F>
struct conditional {
  using type = T;
};
template <class T, class F>
struct conditional<false, T, F> {
  using type = F;
};
template <bool B, class T, class F>
using conditional_t = typename conditional<B, T, F>::type;

#define SOFTMETAL_TRANSFORM(NAME, FROM, TO) \
  template <class T>                        \
  struct NAME {                             \
    using type = T;                         \
  };                                        \
  template <class T>                        \
  struct NAME<FROM> {                       \
    using type = TO;                        \
  };                                        \
  template <class T>                        \
  using NAME##_t = typename NAME<T>::type;
SOFTMETAL_TRANSFORM(remove_const, const T, T)
SOFTMETAL_TRANSFORM(remove_volatile, volatile T, T)
#undef SOFTMETAL_TRANSFORM
template <class T>
struct remove_cv {
  using type = remove_const_t<remove_volatile_t<T>>;
};
template <class T>
using remove_cv_t = typename remove_cv<T>::type;

#define SOFTMETAL_BUILTIN_TRANSFORM(NAME, BUILTIN) \
  template <class T>                               \
  struct NAME {                                    \
    using type = BUILTIN(T);                       \
  };                                               \
  template <class T>                               \
  using NAME##_t = typename NAME<T>::type;
SOFTMETAL_BUILTIN_TRANSFORM(remove_reference, __remove_reference_t)
SOFTMETAL_BUILTIN_TRANSFORM(remove_pointer, __remove_pointer)
SOFTMETAL_BUILTIN_TRANSFORM(remove_extent, __remove_extent)
SOFTMETAL_BUILTIN_TRANSFORM(remove_all_extents, __remove_all_extents)
SOFTMETAL_BUILTIN_TRANSFORM(decay, __decay)
SOFTMETAL_BUILTIN_TRANSFORM(make_signed, __make_signed)
SOFTMETAL_BUILTIN_TRANSFORM(make_unsigned, __make_unsigned)
SOFTMETAL_BUILTIN_TRANSFORM(add_lvalue_reference, __add_lvalue_reference)
SOFTMETAL_BUILTIN_TRANSFORM(add_rvalue_reference, __add_rvalue_reference)
SOFTMETAL_BUILTIN_TRANSFORM(add_pointer, __add_pointer)
SOFTMETAL_BUILTIN_TRANSFORM(underlying_type, __underlying_type)
#undef SOFTMETAL_BUILTIN_TRANSFORM
template <class T>
struct add_const {
  using type = const T;
};
template <class T>
using add_const_t = typename add_const<T>::type;

#define SOFTMETAL_TRAIT(NAME, VALUE)       \
  template <class T>                       \
  struct NAME : bool_constant<(VALUE)> {}; \
  template <class T>                       \
  constexpr bool NAME##_v = NAME<T>::value;
SOFTMETAL_TRAIT(is_void, __is_void(T))
SOFTMETAL_TRAIT(is_integral, __is_integral(T))
SOFTMETAL_TRAIT(is_floating_point, __is_same(remove_cv_t<T>, float) || __is_same(remove_cv_t<T>, half) ||
                                       __is_same(remove_cv_t<T>, bfloat))
SOFTMETAL_TRAIT(is_arithmetic, is_integral<T>::value || is_floating_point<T>::value)
SOFTMETAL_TRAIT(is_signed, is_floating_point<T>::value || __is_signed(T))
SOFTMETAL_TRAIT(is_unsigned, __is_unsigned(T))
SOFTMETAL_TRAIT(is_enum, __is_enum(T))
SOFTMETAL_TRAIT(is_union, __is_union(T))
SOFTMETAL_TRAIT(is_class, __is_class(T))
SOFTMETAL_TRAIT(is_array, __is_array(T))
SOFTMETAL_TRAIT(is_pointer, __is_pointer(T))
SOFTMETAL_TRAIT(is_reference, __is_reference(T))
SOFTMETAL_TRAIT(is_lvalue_reference, __is_lvalue_reference(T))
SOFTMETAL_TRAIT(is_rvalue_reference, __is_rvalue_reference(T))
SOFTMETAL_TRAIT(is_function, __is_function(T))
SOFTMETAL_TRAIT(is_const, __is_const(T))
SOFTMETAL_TRAIT(is_volatile, __is_volatile(T))
SOFTMETAL_TRAIT(is_scalar, is_arithmetic<T>::value || __is_enum(T) || __is_pointer(T))
SOFTMETAL_TRAIT(is_trivially_copyable, __is_trivially_copyable(T))
SOFTMETAL_TRAIT(is_trivial, __is_trivial(T))
SOFTMETAL_TRAIT(is_standard_layout, __is_standard_layout(T))
SOFTMETAL_TRAIT(is_pod, __is_pod(T))
#undef SOFTMETAL_TRAIT
#define SOFTMETAL_TRAIT2(NAME, VALUE)      \
  template <class T, class U>              \
  struct NAME : bool_constant<(VALUE)> {}; \
  template <class T, class U>              \
  constexpr bool NAME##_v = NAME<T, U>::value;
SOFTMETAL_TRAIT2(is_same, __is_same(T, U))
SOFTMETAL_TRAIT2(is_base_of, __is_base_of(T, U))
SOFTMETAL_TRAIT2(is_convertible, __is_convertible_to(T, U))
#undef SOFTMETAL_TRAIT2

template <class T>
struct remove_addrspace {
  using type = T;
};
template <class T>
struct remove_addrspace<SOFTMETAL_DEVICE T> {
  using type = T;
};
template <class T>
struct remove_addrspace<SOFTMETAL_THREADGROUP T> {
  using type = T;
};
template <class T>
struct remove_addrspace<SOFTMETAL_CONSTANT_SPACE T> {
  using type = T;
};
template <class T>
using remove_addrspace_t = typename remove_addrspace<T>::type;

template <class T>
add_rvalue_reference_t<T> declval() noexcept;
}  // namespace metal
#include "../common/limits.h"

namespace metal {
enum class mem_flags {
  mem_none = SOFTMETAL_MEM_NONE,
  mem_device = SOFTMETAL_MEM_DEVICE,
  mem_threadgroup = SOFTMETAL_MEM_THREADGROUP,
  mem_texture = SOFTMETAL_MEM_TEXTURE,
  mem_threadgroup_imageblock = 8,
};
SOFTMETAL_INLINE constexpr mem_flags operator|(mem_flags a, mem_flags b) {
  return mem_flags(int(a) | int(b));
}
}  // namespace metal

namespace softmetal {
using namespace metal;

template <class T>
struct vector_traits {
  static constexpr int size = 1;
  using element = T;
};
template <class T, int N>
struct vector_traits<vec<T, N>> {
  static constexpr int size = N;
  using element = T;
};
template <class T>
struct vector_traits<packed3<T>> {
  static constexpr int size = 3;
  using element = T;
};
template <class T>
constexpr int vector_size = vector_traits<T>::size;
template <class T>
using element_of = typename vector_traits<T>::element;

// A type that a function template does not deduce from this argument.
template <class T>
struct identity {
  using type = T;
};
template <class T>
using undeduced = typename identity<T>::type;

// The type that conditionals.py casts an arm of type A to, if the other arm has type B.
template <class A, class B>
struct arm {
  using type = remove_cv_t<remove_addrspace_t<remove_reference_t<A>>>;
};
template <class A, class B>
constexpr bool keeps_its_type =
    __is_array(remove_reference_t<A>) || __is_function(remove_reference_t<A>) || __is_void(A) ||
    (__is_class(remove_reference_t<A>) &&
     __is_same(remove_const_t<remove_reference_t<A>>, remove_const_t<remove_reference_t<B>>));
template <class A, class B>
using arm_t = typename conditional<keeps_its_type<A, B>, identity<A>, arm<A, B>>::type::type;

enum class space { thread, device, constant, threadgroup };
template <class P>
struct pointee_space {
  static constexpr space value = space::thread;
};
template <class T>
struct pointee_space<SOFTMETAL_DEVICE T*> {
  static constexpr space value = space::device;
};
template <class T>
struct pointee_space<SOFTMETAL_CONSTANT_SPACE T*> {
  static constexpr space value = space::constant;
};
template <class T>
struct pointee_space<SOFTMETAL_THREADGROUP T*> {
  static constexpr space value = space::threadgroup;
};
template <space>
struct in_space_tag {};
template <class T>
struct object_space;
template <class T>
struct object_space<T&> : pointee_space<T*> {};
// `this` of a member function for objects in that space.
template <space where, class T>
SOFTMETAL_INLINE auto this_in(T* object) {
  if constexpr (where == space::device)
    return (SOFTMETAL_DEVICE T*)object;
  else if constexpr (where == space::threadgroup)
    return (SOFTMETAL_THREADGROUP T*)object;
  else
    return (SOFTMETAL_CONSTANT T*)object;
}
template <class T>
using tag_of = in_space_tag<object_space<remove_reference_t<T>&>::value>;
}  // namespace softmetal
