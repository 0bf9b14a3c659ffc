// Kernel arguments and threadgroup variables (msl/host/binding.h has the host's). The program defines before
// it includes this:
//   AGX_THREADS             threads per threadgroup, as a uint3
//   AGX_THREADGROUP_BYTES   the sizes of [[threadgroup(n)]] arguments: {n, bytes}, ...
#pragma once
#pragma clang system_header
#include "../../msl/common/binding.h"

extern "C" {
uint3 nir_load_workgroup_id(void) __attribute__((const));
uint3 nir_load_local_invocation_id(void) __attribute__((const));
uint nir_load_local_invocation_index(void) __attribute__((const));
uint nir_load_subgroup_id(void) __attribute__((const));
uint nir_load_subgroup_invocation(void) __attribute__((const));
}

// Buffer n is argument n of the entry point, once in device and once in constant memory. The last one holds
// the size of the grid, which Metal passes in memory too.
#define AGX_BUFFERS 32
struct agx_arguments {
  SOFTMETAL_DEVICE void* device[AGX_BUFFERS];
  SOFTMETAL_CONSTANT_SPACE void* constants[AGX_BUFFERS];
};
#define softmetal_arguments \
  agx_arguments  // in the translated program too, in place of the host's (simt/abi.h)

namespace softmetal {
template <class T>
struct buffer_of;
template <class T>
struct buffer_of<SOFTMETAL_DEVICE T*> {
  SOFTMETAL_INLINE static SOFTMETAL_DEVICE T* get(const softmetal_arguments* a, int n) {
    return (SOFTMETAL_DEVICE T*)a->device[n];
  }
};
template <class T>
struct buffer_of<SOFTMETAL_CONSTANT_SPACE T*> {
  SOFTMETAL_INLINE static SOFTMETAL_CONSTANT_SPACE T* get(const softmetal_arguments* a, int n) {
    return (SOFTMETAL_CONSTANT_SPACE T*)a->constants[n];
  }
};
template <class T>
struct buffer_of<T&> {
  SOFTMETAL_INLINE static T& get(const softmetal_arguments* a, int n) { return *buffer_of<T*>::get(a, n); }
};
template <uint32_t slot>
struct Buffer {
  template <class P>
  SOFTMETAL_INLINE static P get(const softmetal_arguments* a) {
    return buffer_of<P>::get(a, slot);
  }
};

struct Size {
  uint32_t slot, bytes;
};
constexpr Size kThreadgroupBytes[] = {AGX_THREADGROUP_BYTES{~0u, 0}};
constexpr uint32_t threadgroup_bytes(uint32_t slot) {
  for (const Size& one : kThreadgroupBytes)
    if (one.slot == slot) return one.bytes;
  return 0;
}

// A variable of a kernel. The id is part of the type, so that each variable has its own storage.
template <class T, size_t alignment, int id>
SOFTMETAL_INLINE SOFTMETAL_THREADGROUP T& threadgroup_variable() {
  alignas(16) static SOFTMETAL_THREADGROUP char storage[sizeof(T)];
  return *(SOFTMETAL_THREADGROUP T*)storage;
}
template <class T, size_t alignment>
constexpr uint32_t threadgroup_end(uint32_t bytes) {
  return bytes + sizeof(T);
}
template <uint32_t slot>
struct ThreadgroupArgument {
  template <class P>
  SOFTMETAL_INLINE static P get(const softmetal_arguments*) {
    static_assert(threadgroup_bytes(slot) > 0, "give the size of the [[threadgroup(n)]] argument");
    alignas(16) static SOFTMETAL_THREADGROUP char storage[threadgroup_bytes(slot)];
    if constexpr (__is_lvalue_reference(P)) {
      return *(remove_reference_t<P>*)storage;
    } else {
      return (P)storage;
    }
  }
};

#define AGX_POSITION(NAME, VALUE)                                     \
  struct NAME {                                                       \
    template <class P>                                                \
    SOFTMETAL_INLINE static P get(const softmetal_arguments* given) { \
      (void)given;                                                    \
      const uint3 v = VALUE;                                          \
      return position<P>(v.x, v.y, v.z);                              \
    }                                                                 \
  };
#define AGX_INDEX(NAME, VALUE) AGX_POSITION(NAME, (uint3{VALUE, 0, 0}))
#define AGX_GRID (*(const SOFTMETAL_CONSTANT_SPACE uint3*)given->constants[AGX_BUFFERS - 1])
AGX_POSITION(ThreadgroupPositionInGrid, nir_load_workgroup_id())
AGX_POSITION(ThreadgroupsPerGrid, AGX_GRID)
AGX_POSITION(ThreadsPerGrid, AGX_GRID*(AGX_THREADS))
AGX_POSITION(ThreadPositionInThreadgroup, nir_load_local_invocation_id())
AGX_POSITION(ThreadsPerThreadgroup, (AGX_THREADS))
AGX_POSITION(ThreadPositionInGrid, nir_load_workgroup_id() * (AGX_THREADS) + nir_load_local_invocation_id())
AGX_INDEX(ThreadIndexInThreadgroup, nir_load_local_invocation_index())
AGX_INDEX(ThreadIndexInSimdgroup, nir_load_subgroup_invocation())
AGX_INDEX(SimdgroupIndexInThreadgroup, nir_load_subgroup_id())
AGX_INDEX(SimdgroupsPerThreadgroup, ((AGX_THREADS).x * (AGX_THREADS).y * (AGX_THREADS).z + 31) / 32)
AGX_INDEX(ThreadsPerSimdgroup, 32)
AGX_INDEX(ThreadIndexInQuadgroup, nir_load_subgroup_invocation() % 4)
AGX_INDEX(QuadgroupIndexInThreadgroup, nir_load_local_invocation_index() / 4)
#undef AGX_GRID
#undef AGX_INDEX
#undef AGX_POSITION

template <class... P, class... Bindings>
SOFTMETAL_INLINE void invoke(void (*kernel)(P...), const softmetal_arguments* arguments, Bindings...) {
  kernel(Bindings::template get<P>(arguments)...);
}
template <int position, class F>
constexpr uint32_t argument_kind(F) {
  return 0;
}
template <class T>
constexpr uint32_t data_type = 0;

// Copies of structs from other address spaces.
template <class T, class S>
SOFTMETAL_INLINE T copy_words(S source) {
  struct Words {
    uint word[sizeof(T) / 4];
  } words;
  for (size_t i = 0; i < sizeof(T) / 4; ++i) words.word[i] = source[i];
  return __builtin_bit_cast(T, words);
}
template <class T>
SOFTMETAL_INLINE T copy_of(const SOFTMETAL_DEVICE T& source) {
  return copy_words<T>((const SOFTMETAL_DEVICE uint*)&source);
}
template <class T>
SOFTMETAL_INLINE T copy_of(SOFTMETAL_CONSTANT T& source) {
  return copy_words<T>((SOFTMETAL_CONSTANT uint*)&source);
}
template <class T>
SOFTMETAL_INLINE constexpr T&& copy_of(T&& value) {
  return static_cast<T&&>(value);
}
}  // namespace softmetal
