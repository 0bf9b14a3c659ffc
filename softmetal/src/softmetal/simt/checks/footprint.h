// The bytes that a threadgroup has accessed, to count each once.
#pragma once

#include <stdint.h>

#include <bit>
#include <unordered_map>

namespace softmetal {

class Footprint {
 public:
  void clear() { blocks_.clear(); }

  // Adds [address, address + size); returns how many of the bytes are new.
  uint64_t add(uintptr_t address, uint64_t size) {
    uint64_t added = 0;
    for (uintptr_t end = address + size; address < end;) {
      const uint32_t first = address % kBlockBytes;
      const uint32_t last =
          static_cast<uint32_t>(end - address < kBlockBytes - first ? first + (end - address) : kBlockBytes);
      const uint64_t bits = (last - first == kBlockBytes ? ~uint64_t{0} : (uint64_t{1} << (last - first)) - 1)
                            << first;
      uint64_t& block = blocks_[address / kBlockBytes];
      added += static_cast<uint64_t>(std::popcount(bits & ~block));
      block |= bits;
      address += last - first;
    }
    return added;
  }

 private:
  static constexpr uint32_t kBlockBytes = 64;
  std::unordered_map<uintptr_t, uint64_t> blocks_;  // a bit per byte
};

}  // namespace softmetal
