// The memory of a problem of the self-test of tensor operations. Compiled only with Metal.
#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

namespace fattn {

// Where a tensor is in the memory of a problem.
struct Place {
  at::ScalarType type{};
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  int64_t byte = 0;

  int64_t span() const {  // elements from the first to the last
    int64_t last = 0;
    for (size_t dim = 0; dim < sizes.size(); ++dim) last += (sizes[dim] - 1) * strides[dim];
    return last + 1;
  }
  int64_t bytes() const { return span() * int64_t(c10::elementSize(type)); }
};

// All tensors of a problem, with guard bands between. Every byte that is not written is of a NaN.
class Memory {
 public:
  Place add(at::ScalarType type, std::vector<int64_t> sizes, std::vector<int64_t> strides);
  Place add(at::ScalarType type, int64_t size) { return add(type, {size}, {1}); }
  void set(const Place& place, int64_t element, double value);
  double get(const Place& place, int64_t element) const;
  // Whether the bands around a contiguous tensor are as they were.
  bool is_guarded(const Place& place) const;

  void upload();
  void download();
  at::Tensor on_device(const Place& place) const;

 private:
  std::vector<uint8_t> bytes_;
  at::Tensor device_;
};

// Numbers between -1 and 1, the same in every process. torch's generators are the caller's.
class Numbers {
 public:
  float next() {
    state_ = state_ * 1664525u + 1013904223u;
    return float(state_ >> 8) / float(1 << 23) - 1.0f;
  }

 private:
  uint32_t state_ = 24;
};

}  // namespace fattn
