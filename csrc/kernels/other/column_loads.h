// Loads and stores of the four neighbouring columns that a lane takes at a time.
#pragma once

#include <metal_stdlib>

#include "../common/params.h"

using namespace metal;

FATTN_DECLARE_CONSTANT(bool, vector_loads)

namespace fattn {

typedef FATTN_T Element;  // float, half or bfloat

FATTN_CONSTEXPR int kLaneColumns = 4;

// Four neighbouring columns, with one access if they are aligned.
template <typename T>
inline void load_columns(const device T* source, int column, bool aligned,
                         thread float (&numbers)[kLaneColumns]) {
  typedef vec<T, kLaneColumns> Columns;
  Columns columns;
  if (aligned) {
    columns = *(const device Columns*)(source + column);
  }
  FATTN_UNROLL
  for (int e = 0; e < kLaneColumns; e++) {
    numbers[e] = float(aligned ? columns[e] : source[column + e]);
  }
}

template <typename T, typename Number>
inline void store_columns(device T* target, int column, thread const Number (&numbers)[kLaneColumns]) {
  typedef vec<T, kLaneColumns> Columns;
  Columns columns;
  FATTN_UNROLL
  for (int e = 0; e < kLaneColumns; e++) {
    columns[e] = T(numbers[e]);
    if (!fc_vector_loads) {
      target[column + e] = columns[e];
    }
  }
  if (fc_vector_loads) {
    *(device Columns*)(target + column) = columns;
  }
}

}  // namespace fattn
