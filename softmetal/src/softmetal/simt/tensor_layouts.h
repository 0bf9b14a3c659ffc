// The placement of the elements of a cooperative tensor under the layout of a dispatch.
#pragma once
#include "abi.h"

namespace softmetal {

struct TensorShape {
  uint32_t role, rows, columns, threads;  // as in softmetal_tensor_place
  bool operator==(const TensorShape&) const = default;
};

// The result lives as long as the process.
const softmetal_tensor_placement* place_tensor(uint32_t layout, uint64_t seed, const TensorShape&);

// The last answers to one OS thread: a kernel makes the same tensors in every step of a loop.
class TensorPlaces {
 public:
  const softmetal_tensor_placement* find(uint32_t layout, uint64_t seed, const TensorShape&);

 private:
  struct Answer {
    uint32_t layout;
    uint64_t seed;
    TensorShape shape;
    const softmetal_tensor_placement* placement;
  };
  Answer answers_[64] = {};
};

}  // namespace softmetal
