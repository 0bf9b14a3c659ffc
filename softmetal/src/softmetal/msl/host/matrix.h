// <metal_matrix>: matrices of 2 to 4 columns, each a vector of 2 to 4 rows, in consecutive memory.
#pragma once
#pragma clang system_header
#include "geometric.h"

namespace metal {
template <class T, int C, int R>
struct matrix {
  static_assert(is_floating_point_v<T>, "a matrix holds half or float");
  static_assert(C >= 2 && C <= 4 && R >= 2 && R <= 4, "a matrix has 2 to 4 columns and rows");
  using Column = vec<T, R>;
  Column columns[C];

  matrix() = default;
  // The diagonal; zero elsewhere.
  SOFTMETAL_INLINE explicit constexpr matrix(T diagonal) : matrix(Elements(diagonal), Indices()) {}
  template <int n = C, enable_if_t<n == 2, int> = 0>
  SOFTMETAL_INLINE constexpr matrix(Column a, Column b) : columns{a, b} {}
  template <int n = C, enable_if_t<n == 3, int> = 0>
  SOFTMETAL_INLINE constexpr matrix(Column a, Column b, Column c) : columns{a, b, c} {}
  template <int n = C, enable_if_t<n == 4, int> = 0>
  SOFTMETAL_INLINE constexpr matrix(Column a, Column b, Column c, Column d) : columns{a, b, c, d} {}
  // All elements, column by column.
  template <class... S, enable_if_t<sizeof...(S) == C * R, int> = 0>
  SOFTMETAL_INLINE explicit constexpr matrix(S... elements) : matrix(Elements((T)elements...), Indices()) {}
  template <class U>
  SOFTMETAL_INLINE explicit constexpr matrix(const matrix<U, C, R>& other)
      : matrix(Elements(other), Indices()) {}

  SOFTMETAL_INLINE constexpr Column& operator[](int i) { return columns[i]; }
  SOFTMETAL_INLINE constexpr const Column& operator[](int i) const { return columns[i]; }

 private:
  // Elements by column and row: in constant expressions clang evaluates stores to array elements, but not to
  // vector elements.
  struct Elements {
    T of[C][R] = {};

    SOFTMETAL_INLINE explicit constexpr Elements(T diagonal) {
      for (int i = 0; i < C && i < R; ++i) of[i][i] = diagonal;
    }
    template <class... S, enable_if_t<sizeof...(S) == C * R, int> = 0>
    SOFTMETAL_INLINE explicit constexpr Elements(S... elements) {
      const T all[] = {elements...};
      for (int i = 0; i < C * R; ++i) of[i / R][i % R] = all[i];
    }
    template <class U>
    SOFTMETAL_INLINE explicit constexpr Elements(const matrix<U, C, R>& other) {
      for (int i = 0; i < C * R; ++i) of[i / R][i % R] = (T)other.columns[i / R][i % R];
    }
    SOFTMETAL_INLINE constexpr Column column(int i) const {
      if constexpr (R == 2) {
        return Column{of[i][0], of[i][1]};
      } else if constexpr (R == 3) {
        return Column{of[i][0], of[i][1], of[i][2]};
      } else {
        return Column{of[i][0], of[i][1], of[i][2], of[i][3]};
      }
    }
  };
  template <class I, I... i>
  struct Sequence {};
  using Indices = __make_integer_seq<Sequence, int, C>;
  template <int... i>
  SOFTMETAL_INLINE constexpr matrix(const Elements& elements, Sequence<int, i...>)
      : columns{elements.column(i)...} {}
};

#define SOFTMETAL_MATRIX_TEMPLATE  \
  template <class T, int C, int R> \
  SOFTMETAL_INLINE constexpr
SOFTMETAL_MATRIX_TEMPLATE matrix<T, C, R> operator+(const matrix<T, C, R>& a, const matrix<T, C, R>& b) {
  matrix<T, C, R> sum(T(0));
  for (int i = 0; i < C; ++i) sum[i] = a[i] + b[i];
  return sum;
}
SOFTMETAL_MATRIX_TEMPLATE matrix<T, C, R> operator-(const matrix<T, C, R>& a, const matrix<T, C, R>& b) {
  matrix<T, C, R> difference(T(0));
  for (int i = 0; i < C; ++i) difference[i] = a[i] - b[i];
  return difference;
}
SOFTMETAL_MATRIX_TEMPLATE matrix<T, C, R> operator-(const matrix<T, C, R>& a) {
  matrix<T, C, R> negative(T(0));
  for (int i = 0; i < C; ++i) negative[i] = -a[i];
  return negative;
}
SOFTMETAL_MATRIX_TEMPLATE matrix<T, C, R> operator*(const matrix<T, C, R>& a, softmetal::undeduced<T> scale) {
  matrix<T, C, R> product(T(0));
  for (int i = 0; i < C; ++i) product[i] = a[i] * scale;
  return product;
}
SOFTMETAL_MATRIX_TEMPLATE matrix<T, C, R> operator*(softmetal::undeduced<T> scale, const matrix<T, C, R>& a) {
  return a * scale;
}
SOFTMETAL_MATRIX_TEMPLATE vec<T, R> operator*(const matrix<T, C, R>& a, softmetal::undeduced<vec<T, C>> v) {
  vec<T, R> sum = a[0] * v[0];
  for (int i = 1; i < C; ++i) sum += a[i] * v[i];
  return sum;
}
SOFTMETAL_MATRIX_TEMPLATE vec<T, C> operator*(softmetal::undeduced<vec<T, R>> v, const matrix<T, C, R>& a) {
  vec<T, C> product = vec<T, C>(T(0));
  for (int i = 0; i < C; ++i) {
    T sum = v[0] * a[i][0];
    for (int k = 1; k < R; ++k) sum += v[k] * a[i][k];
    product[i] = sum;
  }
  return product;
}
template <class T, int C, int K, int R>
SOFTMETAL_INLINE constexpr matrix<T, C, R> operator*(const matrix<T, K, R>& a, const matrix<T, C, K>& b) {
  matrix<T, C, R> product(T(0));
  for (int i = 0; i < C; ++i) product[i] = a * b[i];
  return product;
}
SOFTMETAL_MATRIX_TEMPLATE bool operator==(const matrix<T, C, R>& a, const matrix<T, C, R>& b) {
  for (int i = 0; i < C * R; ++i)
    if (a[i / R][i % R] != b[i / R][i % R]) return false;
  return true;
}
SOFTMETAL_MATRIX_TEMPLATE bool operator!=(const matrix<T, C, R>& a, const matrix<T, C, R>& b) {
  return !(a == b);
}
SOFTMETAL_MATRIX_TEMPLATE matrix<T, C, R>& operator+=(matrix<T, C, R>& a, const matrix<T, C, R>& b) {
  return a = a + b;
}
SOFTMETAL_MATRIX_TEMPLATE matrix<T, C, R>& operator-=(matrix<T, C, R>& a, const matrix<T, C, R>& b) {
  return a = a - b;
}
SOFTMETAL_MATRIX_TEMPLATE matrix<T, C, R>& operator*=(matrix<T, C, R>& a, softmetal::undeduced<T> scale) {
  return a = a * scale;
}
SOFTMETAL_MATRIX_TEMPLATE matrix<T, C, R>& operator*=(matrix<T, C, R>& a, const matrix<T, C, C>& b) {
  return a = a * b;
}

SOFTMETAL_MATRIX_TEMPLATE matrix<T, R, C> transpose(const matrix<T, C, R>& a) {
  matrix<T, R, C> rows(T(0));
  for (int i = 0; i < C; ++i)
    for (int k = 0; k < R; ++k) rows[k][i] = a[i][k];
  return rows;
}
#undef SOFTMETAL_MATRIX_TEMPLATE
}  // namespace metal

#define SOFTMETAL_MATRIX(T, C, R)            \
  using T##C##x##R = metal::matrix<T, C, R>; \
  namespace metal {                          \
  using ::T##C##x##R;                        \
  }
SOFTMETAL_FOR_EACH_MATRIX(SOFTMETAL_MATRIX, half)
SOFTMETAL_FOR_EACH_MATRIX(SOFTMETAL_MATRIX, float)
#undef SOFTMETAL_MATRIX
