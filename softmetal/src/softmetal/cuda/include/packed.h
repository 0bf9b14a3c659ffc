// metal::packed_float3 and the like: elements in memory without the alignment of a vector.
#pragma once

#include "vectors.h"

namespace softmetal {

// Loads from any address with the largest loads that its alignment allows: an Apple GPU reads a packed vector
// at once.
template <typename T, int N>
SOFTMETAL_INLINE metal::vec<T, N> unpacked(const T (&elements)[N]) {
  metal::vec<T, N> result;
  if constexpr (sizeof(T) == 1 && N % 2 == 0) {
    if (reinterpret_cast<uint64_t>(elements) % 2 == 0) {
      const ushort* pairs = reinterpret_cast<const ushort*>(elements);
#pragma unroll
      for (int i = 0; i < N / 2; ++i) {
        result[2 * i] = T(pairs[i] & 0xffu);
        result[2 * i + 1] = T(pairs[i] >> 8);
      }
      return result;
    }
  }
#pragma unroll
  for (int i = 0; i < N; ++i) result[i] = elements[i];
  return result;
}

}  // namespace softmetal

namespace metal {

template <typename T, int N>
struct packed_vec {
  T elements[N];

  packed_vec() = default;
  SOFTMETAL_INLINE packed_vec(vec<T, N> v) {
#pragma unroll
    for (int i = 0; i < N; ++i) elements[i] = v[i];
  }
  SOFTMETAL_INLINE operator vec<T, N>() const { return softmetal::unpacked(elements); }
  template <typename U>
  SOFTMETAL_INLINE explicit operator vec<U, N>() const {
    return vec<U, N>(softmetal::unpacked(elements));
  }
  SOFTMETAL_INLINE T& operator[](int i) { return elements[i]; }
  SOFTMETAL_INLINE const T& operator[](int i) const { return elements[i]; }
};

#define SOFTMETAL_PACKED_NAMES(T)         \
  typedef packed_vec<T, 2> packed_##T##2; \
  typedef packed_vec<T, 3> packed_##T##3; \
  typedef packed_vec<T, 4> packed_##T##4;
SOFTMETAL_FOR_EACH_NUMBER(SOFTMETAL_PACKED_NAMES)
#undef SOFTMETAL_PACKED_NAMES

}  // namespace metal
