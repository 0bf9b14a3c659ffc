// Threadgroup memory of one worker: the variables and arguments of the kernel, placed at first use. Red zones
// between them catch overruns. Everything is NaN when a threadgroup starts.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <string>
#include <vector>

namespace softmetal {

class Arena {
 public:
  struct Array {
    uint32_t offset, size;
    std::string name;
    int line;
  };

  Arena();
  Arena(const Arena&) = delete;
  ~Arena();

  void begin_dispatch(bool wide_red_zones);
  void poison();  // at the start of a threadgroup

  // Index in arrays() of variable `id`, or -1 if it is not placed yet.
  int find(uint32_t id) const { return id < places_.size() ? places_[id] : -1; }
  // Returns -1 if the kernel's total exceeds Metal's limit.
  int place(uint32_t id, size_t size, size_t align, std::string name, int line);

  char* address(int array) const { return base_ + arrays_[array].offset; }
  const std::vector<Array>& arrays() const { return arrays_; }
  uint32_t total() const { return total_; }  // bytes as Metal counts them, without red zones
  bool contains(uintptr_t address) const { return address - reinterpret_cast<uintptr_t>(base_) < kCapacity; }
  uint32_t offset_of(uintptr_t address) const {
    return static_cast<uint32_t>(address - reinterpret_cast<uintptr_t>(base_));
  }

 private:
  static constexpr size_t kCapacity = 4u << 20;
  char* base_;
  uint32_t used_ = 0, total_ = 0, red_zone_ = 0, dirty_ = 0;
  std::vector<Array> arrays_;
  std::vector<int> places_;
};

}  // namespace softmetal
