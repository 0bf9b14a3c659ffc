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

#define SOFTMETAL_MATRIX_NAME(T, columns, rows) typedef matrix<T, columns, rows> T##columns##x##rows;
SOFTMETAL_FOR_EACH_MATRIX(SOFTMETAL_MATRIX_NAME, half)
SOFTMETAL_FOR_EACH_MATRIX(SOFTMETAL_MATRIX_NAME, float)
#undef SOFTMETAL_MATRIX_NAME

}  // namespace metal
