// The dimensions of a tensor outside its rows.
#pragma once

#include <cstdint>

#include <c10/util/SmallVector.h>

namespace fattn {

// Innermost first. `others`: strides of a second tensor of the same shape, if there is one.
struct RowDims {
  c10::SmallVector<int64_t, 8> sizes;
  c10::SmallVector<int64_t, 8> strides;
  c10::SmallVector<int64_t, 8> others;

  // Adds an outer dimension, merged with the last one where the strides allow.
  void add(int64_t size, int64_t stride, int64_t other = 0) {
    if (size == 1) return;
    if (!sizes.empty() && stride == sizes.back() * strides.back() && other == sizes.back() * others.back()) {
      sizes.back() *= size;
      return;
    }
    sizes.push_back(size);
    strides.push_back(stride);
    others.push_back(other);
  }
};

}  // namespace fattn
