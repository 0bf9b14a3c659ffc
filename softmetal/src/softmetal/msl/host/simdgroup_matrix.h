// <metal_simdgroup_matrix>: the product of 8x8 matrices, by the last lane that arrives.
#pragma once
#pragma clang system_header
#include "simdgroup.h"
#include "../common/fragment.h"

namespace softmetal {
SOFTMETAL_INLINE Fragment fragment() { return fragment_of(softmetal_current_lane()->lane); }

// d = a * b + c in float, as a sequence of fused multiply-adds (the GPU's order of summation is not
// published). The result is rounded once to the element type of d, when a lane takes its elements.
SOFTMETAL_UNCHECKED inline void multiply(softmetal_simdgroup* group) {
  ++softmetal_thread_counters()->products;
  typedef float Row __attribute__((ext_vector_type(8)));
  for (int i = 0; i < 8; ++i) {
    Row sum = *(const Row*)&group->c[i * 8];
    for (int k = 0; k < 8; ++k) {
      const Row left = group->a[i * 8 + k];
      sum = __builtin_elementwise_fma(left, *(const Row*)&group->b[k * 8], sum);
    }
    *(Row*)&group->d[i * 8] = sum;
  }
}

// The result of thread_elements(). Apple's type is a vector of 64 elements of which a lane holds two. It can
// be indexed, but does not convert to a vector of two.
template <class T>
struct alignas(2 * sizeof(T)) ThreadElements {
  T values[2];
  SOFTMETAL_INLINE T& operator[](int i) { return values[i]; }
  SOFTMETAL_INLINE const T& operator[](int i) const { return values[i]; }
};

template <class D, class A, class B, class C>
SOFTMETAL_UNCHECKED ThreadElements<D> multiply_operation(ThreadElements<A> a, ThreadElements<B> b,
                                                         ThreadElements<C> c, Line line) {
  softmetal_simdgroup* group = softmetal_current_lane()->simdgroup;
  const Fragment f = fragment();
  const int first = f.row * 8 + f.column;
  for (int i = 0; i < 2; ++i) {
    group->a[first + i] = (float)a[i];
    group->b[first + i] = (float)b[i];
    group->c[first + i] = (float)c[i];
  }
  softmetal_rendezvous_all(multiply, line.number);
  return {(D)group->d[first], (D)group->d[first + 1]};
}
}  // namespace softmetal

#include "../common/simdgroup_matrix.h"

namespace metal {
SOFTMETAL_MATRIX_MEMORY(SOFTMETAL_DEVICE)
SOFTMETAL_MATRIX_MEMORY(SOFTMETAL_THREADGROUP)
#undef SOFTMETAL_MATRIX_MEMORY
}  // namespace metal
