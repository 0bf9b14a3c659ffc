// metal::matrix<T, 2..4, 2..4>: consecutive columns, conversions and copies; no arithmetic.
#pragma once

#include "vectors.h"

namespace metal {

template <typename T, int Columns, int Rows>
struct matrix {
  vec<T, Rows> columns[Columns];

  matrix() = default;
  template <typename U>
  SOFTMETAL_INLINE constexpr explicit matrix(const matrix<U, Columns, Rows>& other) {
#pragma unroll
    for (int i = 0; i < Columns; ++i) columns[i] = vec<T, Rows>(other.columns[i]);
  }
  SOFTMETAL_INLINE constexpr vec<T, Rows>& operator[](int i) { return columns[i]; }
  SOFTMETAL_INLINE constexpr const vec<T, Rows>& operator[](int i) const { return columns[i]; }
};

#define SOFTMETAL_MATRIX_NAMES(T) \
  typedef matrix<T, 2, 2> T##2x2; \
  typedef matrix<T, 2, 3> T##2x3; \
  typedef matrix<T, 2, 4> T##2x4; \
  typedef matrix<T, 3, 2> T##3x2; \
  typedef matrix<T, 3, 3> T##3x3; \
  typedef matrix<T, 3, 4> T##3x4; \
  typedef matrix<T, 4, 2> T##4x2; \
  typedef matrix<T, 4, 3> T##4x3; \
  typedef matrix<T, 4, 4> T##4x4;
SOFTMETAL_MATRIX_NAMES(half)
SOFTMETAL_MATRIX_NAMES(float)
#undef SOFTMETAL_MATRIX_NAMES

}  // namespace metal
