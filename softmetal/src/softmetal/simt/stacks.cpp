// Mapping and colouring of fiber stacks.
#include "stacks.h"

#include <sys/mman.h>

#include <new>

namespace softmetal {

namespace {
constexpr size_t kGuardBytes = 4096;
}

void Stacks::reserve(size_t count) {
  if (count <= lows_.size()) return;
  size_t more = count - lows_.size();
  size_t bytes = more * (kStackBytes + kGuardBytes);
  void* base =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) throw std::bad_alloc();
  mappings_.push_back({static_cast<char*>(base), bytes});
  for (size_t i = 0; i < more; i++) {
    char* guard = static_cast<char*>(base) + i * (kStackBytes + kGuardBytes);
    mprotect(guard, kGuardBytes, PROT_NONE);  // best effort: the kernel limits the number of mappings
    lows_.push_back(guard + kGuardBytes);
  }
}

// Stacks start at different offsets in their pages: with equal offsets the hot ends of all stacks map to the
// same few cache sets, which makes a switch 50 % slower.
char* Stacks::top(size_t i) const { return lows_[i] + kStackBytes - (i % 61) * 192; }

Stacks::~Stacks() {
  for (const Mapping& m : mappings_) munmap(m.base, m.bytes);
}

}  // namespace softmetal
