// A problem of the self-test of tensor operations, in memory. Compiled only with Metal.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "../describe/calls.h"
#include "../plan/plan.h"

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

// Operands of a problem, and results of both kinds of kernels.
class Trial {
 public:
  // `problem`: sizes and options. The trial decides about batch, strides and lengths of sequences: a packed
  // call has a short sequence before a long one. Options that are tensors get numbers of their dtype.
  explicit Trial(const Problem& problem);

  // The call, with its operands on the device.
  Call call() const;
  // Runs both plans and waits for them.
  void run(const Call& call, const Plan& tested, const Plan& expected);
  // What is wrong with the results of the first one, "" if nothing.
  std::string fault() const;

 private:
  struct Sequence {
    int64_t rows;
    int64_t keys;
  };
  struct Results {
    Place out;
    Place lse;
  };

  Place operand(int64_t heads, int64_t rows);
  Results results();
  void add_sequences();
  void add_keys();
  void add_options();
  void add_mask();
  void put_sequences(const Place& starts, bool of_keys);
  int64_t stored_rows() const;
  std::vector<bool> seen_rows() const;
  void fill_rows(const Place& place, const std::vector<bool>& rows, float spread);
  std::string difference(const char* name, const Place& tested, const Place& expected, double most) const;

  Problem problem_;
  at::ScalarType type_;
  std::vector<Sequence> sequences_;
  Memory memory_;
  Numbers numbers_;
  Place query_, key_, value_;
  Place mask_, mask_map_, sinks_, slopes_, starts_, key_starts_, lengths_, blocks_;
  Results tested_, expected_;
};

}  // namespace fattn
