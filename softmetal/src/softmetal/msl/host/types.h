// Scalar, vector and packed types, address spaces.
#pragma once
#pragma clang system_header
#include "../../simt/abi.h"
#include "../common/names.h"

// Distinct types for the language, address space 0 for the optimiser and the sanitizers. In clang's SYCL mode
// (compile.py) the default space, Metal's `thread`, includes all others: structs can be copied between any
// two, and member functions work on objects in any. The rules (../rules) distinguish the spaces where Metal
// does.
#define SOFTMETAL_THREAD
#define SOFTMETAL_DEVICE __attribute__((opencl_global_device))
#define SOFTMETAL_THREADGROUP __attribute__((opencl_local))
#define SOFTMETAL_CONSTANT_SPACE __attribute__((opencl_global_host))
#define SOFTMETAL_CONSTANT const SOFTMETAL_CONSTANT_SPACE

#define SOFTMETAL_UNROLL  // a pragma where loops over the dimensions of a tensor must be unrolled
                          // (cuda/include)
// Library functions are not in the line tables: findings in them name the line of the kernel that called
// them.
#define SOFTMETAL_INLINE inline __attribute__((always_inline, nodebug))
// Checks must not attribute the library's own memory traffic to the kernel. Without callbacks there is none
// to hide, and inlining a simdgroup operation into the kernel saves a quarter of its cost.
#if __has_feature(address_sanitizer)
#define SOFTMETAL_UNCHECKED __attribute__((noinline, nodebug, no_sanitize("address")))
#else
#define SOFTMETAL_UNCHECKED SOFTMETAL_INLINE
#endif

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef _Float16 half;
typedef __bf16 bfloat;

namespace metal {
using ::uchar;
using ::uint;
using ::ulong;
using ::ushort;
template <class T, int N>
using vec = T __attribute__((ext_vector_type(N)));
}  // namespace metal

namespace softmetal {
// An element of a vector of bool, 0 or 1: clang packs its own vectors of bool into bits. Nothing else uses
// this type, so these vectors differ from vectors of bytes.
using Boolean = char8_t;
template <int N>
using booleans = metal::vec<Boolean, N>;
}  // namespace softmetal

#define SOFTMETAL_VECTORS_OF(T, ELEMENT) \
  using T##2 = metal::vec<ELEMENT, 2>;   \
  using T##3 = metal::vec<ELEMENT, 3>;   \
  using T##4 = metal::vec<ELEMENT, 4>;   \
  namespace metal {                      \
  using ::T##2;                          \
  using ::T##3;                          \
  using ::T##4;                          \
  }
#define SOFTMETAL_VECTORS(T) SOFTMETAL_VECTORS_OF(T, T)
SOFTMETAL_VECTORS_OF(bool, softmetal::Boolean)
SOFTMETAL_FOR_EACH_NUMBER(SOFTMETAL_VECTORS)
#undef SOFTMETAL_VECTORS
#undef SOFTMETAL_VECTORS_OF

namespace softmetal {
// Three elements without padding, a layout that clang's vector types lack. Loads from any address space,
// stores by element.
template <class T>
struct packed3 {
  T x, y, z;
  packed3() = default;
  packed3(const packed3&) = default;
  packed3& operator=(const packed3&) = default;
  SOFTMETAL_INLINE packed3(metal::vec<T, 3> v) : x(v.x), y(v.y), z(v.z) {}
  SOFTMETAL_INLINE packed3(T a, T b, T c) : x(a), y(b), z(c) {}
  SOFTMETAL_INLINE packed3(const SOFTMETAL_DEVICE packed3& p) : x(p.x), y(p.y), z(p.z) {}
  SOFTMETAL_INLINE packed3(const SOFTMETAL_THREADGROUP packed3& p) : x(p.x), y(p.y), z(p.z) {}
  SOFTMETAL_INLINE packed3(SOFTMETAL_CONSTANT packed3& p) : x(p.x), y(p.y), z(p.z) {}
  SOFTMETAL_INLINE T& operator[](uint i) { return (&x)[i]; }
  SOFTMETAL_INLINE const T& operator[](uint i) const { return (&x)[i]; }
  SOFTMETAL_INLINE operator metal::vec<T, 3>() const { return metal::vec<T, 3>{x, y, z}; }
  SOFTMETAL_INLINE T& operator[](int i) { return (&x)[i]; }
  SOFTMETAL_INLINE const T& operator[](int i) const { return (&x)[i]; }
#define SOFTMETAL_COMPOUND(OP)                                \
  template <class Other>                                      \
  SOFTMETAL_INLINE packed3& operator OP##=(Other other) {     \
    return *this = packed3(metal::vec<T, 3>(*this) OP other); \
  }
  SOFTMETAL_COMPOUND(+)
  SOFTMETAL_COMPOUND(-)
  SOFTMETAL_COMPOUND(*)
  SOFTMETAL_COMPOUND(/)
  SOFTMETAL_COMPOUND(%)
  SOFTMETAL_COMPOUND(&)
  SOFTMETAL_COMPOUND(|)
  SOFTMETAL_COMPOUND(^)
  SOFTMETAL_COMPOUND(<<)
  SOFTMETAL_COMPOUND(>>)
#undef SOFTMETAL_COMPOUND
};
}  // namespace softmetal

#define SOFTMETAL_PACKED(T)                                                        \
  typedef T packed_##T##2 __attribute__((ext_vector_type(2), aligned(sizeof(T)))); \
  typedef softmetal::packed3<T> packed_##T##3;                                     \
  typedef T packed_##T##4 __attribute__((ext_vector_type(4), aligned(sizeof(T)))); \
  namespace metal {                                                                \
  using ::packed_##T##2;                                                           \
  using ::packed_##T##3;                                                           \
  using ::packed_##T##4;                                                           \
  }
SOFTMETAL_FOR_EACH_NUMBER(SOFTMETAL_PACKED)
#undef SOFTMETAL_PACKED
