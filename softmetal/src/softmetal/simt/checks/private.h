// The private arrays of a threadgroup's threads, and their initialised bytes.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <vector>

namespace softmetal {

struct Fiber;

class PrivateMemory {
 public:
  struct Array {
    char* low;
    uint64_t size;
    const char* name;
  };

  explicit PrivateMemory(uint32_t threads);
  PrivateMemory(const PrivateMemory&) = delete;
  ~PrivateMemory();

  void begin(const Fiber&, void* array, uint64_t size, const char* name);
  void end(const Fiber&, void* array, uint64_t size);
  void fill(const Fiber&, void* array);
  void write(const Fiber&, const void* address, uint64_t size);
  bool read(const Fiber&, const void* address, uint64_t size);  // false: some byte is uninitialised
  const Array* find(const Fiber&, const void* address) const;

 private:
  char* state(const Fiber&, const void* address);

  std::vector<std::vector<Array>> arrays_;  // by thread
  size_t bytes_;
  char* state_;
};

}  // namespace softmetal
