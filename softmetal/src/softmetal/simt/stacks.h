// The stacks of a worker's fibers: a growing mapping that dispatches reuse, with a guard page below every
// stack.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <vector>

namespace softmetal {

inline constexpr size_t kStackBytes = 128 * 1024;  // virtual; only touched pages cost memory

class Stacks {
 public:
  Stacks() = default;
  Stacks(const Stacks&) = delete;
  ~Stacks();
  void reserve(size_t count);
  size_t size() const { return lows_.size(); }
  char* low(size_t i) const { return lows_[i]; }
  char* top(size_t i) const;

 private:
  struct Mapping {
    char* base;
    size_t bytes;
  };
  std::vector<Mapping> mappings_;
  std::vector<char*> lows_;
};

}  // namespace softmetal
