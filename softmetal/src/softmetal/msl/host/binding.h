// Kernel arguments, which an entry point fetches before it calls the kernel; function constants; threadgroup
// variables.
#pragma once
#pragma clang system_header
#include "../common/binding.h"
#include "texture.h"
#include "vectors.h"

namespace softmetal {
template <class T>
SOFTMETAL_INLINE T function_constant(uint32_t index) {
  uint64_t bits = 0;
  softmetal_function_constant(index, &bits);
  T value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}
SOFTMETAL_INLINE bool function_constant_defined(uint32_t index) {
  uint64_t bits;
  return softmetal_function_constant(index, &bits);
}

// MTLDataType of a function constant.
template <class T>
struct data_type_of {
  static_assert(sizeof(T) == 0, "a function constant is a scalar or a vector");
  static constexpr uint32_t value = 0;
};
#define SOFTMETAL_DATA_TYPE(T, VALUE)        \
  template <>                                \
  struct data_type_of<T> {                   \
    static constexpr uint32_t value = VALUE; \
  };
SOFTMETAL_DATA_TYPE(float, 3)
SOFTMETAL_DATA_TYPE(half, 16)
SOFTMETAL_DATA_TYPE(int, 29)
SOFTMETAL_DATA_TYPE(uint, 33)
SOFTMETAL_DATA_TYPE(short, 37)
SOFTMETAL_DATA_TYPE(ushort, 41)
SOFTMETAL_DATA_TYPE(char, 45)
SOFTMETAL_DATA_TYPE(uchar, 49)
SOFTMETAL_DATA_TYPE(bool, 53)
SOFTMETAL_DATA_TYPE(long, 81)
SOFTMETAL_DATA_TYPE(ulong, 85)
SOFTMETAL_DATA_TYPE(bfloat, 121)
#undef SOFTMETAL_DATA_TYPE
template <class T>
constexpr uint32_t data_type = data_type_of<element_of<T>>::value + vector_size<T> - 1;

// The end of a variable of type T that follows `bytes` other bytes.
template <class T, size_t alignment>
constexpr uint32_t threadgroup_end(uint32_t bytes) {
  constexpr uint32_t align = alignment > alignof(T) ? alignment : alignof(T);
  return (bytes + align - 1) / align * align + sizeof(T);
}

template <class T, size_t alignment>
SOFTMETAL_INLINE SOFTMETAL_THREADGROUP T& threadgroup_variable(int id, const char* name, int line) {
  constexpr size_t align = alignment > alignof(T) ? alignment : alignof(T);
  return *(SOFTMETAL_THREADGROUP T*)softmetal_threadgroup_variable(id, sizeof(T), align, name, line);
}

// A reference to an absent optional argument must be safe to read before the test that skips it.
template <class T>
struct Absent {
  alignas(64) static constexpr char storage[sizeof(T) + 64] = {};
};
template <class T>
alignas(64) constexpr char Absent<T>::storage[sizeof(T) + 64];

template <uint32_t slot>
struct Buffer {
  template <class P>
  SOFTMETAL_INLINE static P get(const softmetal_arguments* arguments) {
    void* address = arguments->buffer[slot];
    if constexpr (__is_lvalue_reference(P)) {
      using T = remove_reference_t<P>;
      return *(T*)(address ? address : (void*)Absent<T>::storage);
    } else if constexpr (__is_base_of(Handle, P)) {
      return P();
    } else {
      return (P)address;
    }
  }
};
template <uint32_t slot>
struct ThreadgroupArgument {
  template <class P>
  SOFTMETAL_INLINE static P get(const softmetal_arguments*) {
    void* address = softmetal_threadgroup_argument(slot);
    if constexpr (__is_lvalue_reference(P)) {
      return *(remove_reference_t<P>*)address;
    } else {
      return (P)address;
    }
  }
};

// A texture or sampler, which has no buffer index.
struct Unsupported {
  template <class P>
  SOFTMETAL_INLINE static P get(const softmetal_arguments*) {
    return P();
  }
};

template <class P>
constexpr bool is_position =
    (is_same_v<element_of<P>, uint> || is_same_v<element_of<P>, ushort>) && vector_size<P> <= 3;
#define SOFTMETAL_ATTRIBUTE(NAME, X, Y, Z)                      \
  struct NAME {                                                 \
    template <class P>                                          \
    SOFTMETAL_INLINE static P get(const softmetal_arguments*) { \
      const softmetal_lane* lane = softmetal_current_lane();    \
      const softmetal_threadgroup* group = lane->threadgroup;   \
      (void)group;                                              \
      return position<P>(X, Y, Z);                              \
    }                                                           \
  };
#define SOFTMETAL_POSITION(NAME, V) SOFTMETAL_ATTRIBUTE(NAME, V(x), V(y), V(z))
#define SOFTMETAL_INDEX(NAME, VALUE) SOFTMETAL_ATTRIBUTE(NAME, VALUE, 0, 0)
#define SOFTMETAL_GRID_POSITION(c) group->position.c * group->size.c + lane->position.c
#define SOFTMETAL_GRID_SIZE(c) group->grid.c * group->size.c
#define SOFTMETAL_GROUP_POSITION(c) lane->position.c
#define SOFTMETAL_GROUP_SIZE(c) group->size.c
#define SOFTMETAL_GROUP_INDEX(c) group->position.c
#define SOFTMETAL_GROUPS(c) group->grid.c
SOFTMETAL_POSITION(ThreadPositionInGrid, SOFTMETAL_GRID_POSITION)
SOFTMETAL_POSITION(ThreadsPerGrid, SOFTMETAL_GRID_SIZE)
SOFTMETAL_POSITION(ThreadPositionInThreadgroup, SOFTMETAL_GROUP_POSITION)
SOFTMETAL_POSITION(ThreadsPerThreadgroup, SOFTMETAL_GROUP_SIZE)
SOFTMETAL_POSITION(ThreadgroupPositionInGrid, SOFTMETAL_GROUP_INDEX)
SOFTMETAL_POSITION(ThreadgroupsPerGrid, SOFTMETAL_GROUPS)
SOFTMETAL_INDEX(ThreadIndexInThreadgroup, lane->index)
SOFTMETAL_INDEX(ThreadIndexInSimdgroup, lane->lane)
SOFTMETAL_INDEX(SimdgroupIndexInThreadgroup, lane->simdgroup->index)
SOFTMETAL_INDEX(SimdgroupsPerThreadgroup, group->simdgroups)
SOFTMETAL_INDEX(ThreadsPerSimdgroup, SOFTMETAL_SIMD_WIDTH)
SOFTMETAL_INDEX(ThreadIndexInQuadgroup, lane->index % 4)
SOFTMETAL_INDEX(QuadgroupIndexInThreadgroup, lane->index / 4)
SOFTMETAL_INDEX(QuadgroupsPerThreadgroup, (group->threads + 3) / 4)
#undef SOFTMETAL_GROUPS
#undef SOFTMETAL_GROUP_INDEX
#undef SOFTMETAL_GROUP_SIZE
#undef SOFTMETAL_GROUP_POSITION
#undef SOFTMETAL_GRID_SIZE
#undef SOFTMETAL_GRID_POSITION
#undef SOFTMETAL_INDEX
#undef SOFTMETAL_POSITION
#undef SOFTMETAL_ATTRIBUTE

template <class... P, class... Bindings>
__attribute__((always_inline, nodebug, no_sanitize("coverage"))) inline void invoke(
    void (*kernel)(P...), const softmetal_arguments* arguments, Bindings...) {
  kernel(Bindings::template get<P>(arguments)...);
}

template <int position, class First, class... Rest>
struct nth : nth<position - 1, Rest...> {};
template <class First, class... Rest>
struct nth<0, First, Rest...> {
  using type = First;
};

template <class P>
struct argument_kind_of {
  static_assert(__is_base_of(Handle, P), "a buffer is a pointer or reference to device or constant memory");
  static constexpr uint32_t value = SOFTMETAL_ARG_UNSUPPORTED;
};
template <class P>
struct argument_kind_of<P&> : argument_kind_of<P*> {};
template <class T>
struct argument_kind_of<SOFTMETAL_DEVICE T*> {
  static constexpr uint32_t value = __is_const(T) ? SOFTMETAL_ARG_DEVICE_CONST : SOFTMETAL_ARG_DEVICE;
};
template <class T>
struct argument_kind_of<SOFTMETAL_CONSTANT_SPACE T*> {
  static constexpr uint32_t value = SOFTMETAL_ARG_CONSTANT;
};
template <class T>
struct argument_kind_of<SOFTMETAL_THREADGROUP T*> {
  static constexpr uint32_t value = SOFTMETAL_ARG_THREADGROUP;
};
template <int position, class... P>
constexpr uint32_t argument_kind(void (*)(P...)) {
  return argument_kind_of<remove_cv_t<typename nth<position, P...>::type>>::value;
}
}  // namespace softmetal
