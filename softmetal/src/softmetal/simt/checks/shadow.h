// Shadow memory of the race detector: the last accesses of each piece of memory. Sparse, because a tensor is
// a small part of a large buffer. A page starts with one cell per 4 bytes and is refined to 2 or 1 when an
// access needs it, so the result is exact per byte.
#pragma once

#include <stdint.h>

#include <memory>
#include <unordered_map>
#include <vector>

namespace softmetal {

struct Access {
  static constexpr uint32_t kNone = ~0u;
  uint32_t threadgroup = kNone;
  uint32_t epoch = 0;                          // threadgroup barriers before it
  uint32_t simd_epoch = 0;                     // simdgroup barriers before it
  uint32_t execution = 0, simd_execution = 0;  // the same counts, for barriers of any memory
  uint32_t pc = 0;                             // relative to the module
  uint16_t thread = 0;
  bool write = false, atomic = false;
};

// The last write, and two accesses that represent all accesses since (Checker::note).
struct Cell {
  Access write, other, another;
};

class Shadow {
 public:
  void clear();

  // Calls visit(cell) for the cells of [address, address + size).
  template <class Visit>
  void visit(uintptr_t address, uint32_t size, Visit&& visit) {
    for (uintptr_t end = address + size; address < end;) {
      uintptr_t page_end = (address / kPageBytes + 1) * kPageBytes;
      uintptr_t stop = end < page_end ? end : page_end;
      Page& page = find(address / kPageBytes);
      uint32_t first = address % kPageBytes, last = first + static_cast<uint32_t>(stop - address);
      if ((first | last) & ((1u << page.shift) - 1)) refine(page, first | last);
      for (uint32_t i = first >> page.shift; i < last >> page.shift; i++) visit(page.cells[i]);
      address = stop;
    }
  }

 private:
  static constexpr uint32_t kPageBytes = 512, kCoarsest = 2, kRecent = 256;
  struct Page {
    uint32_t shift = kCoarsest;
    std::vector<Cell> cells = std::vector<Cell>(kPageBytes >> kCoarsest);
  };
  Page& find(uintptr_t number) {
    Recent& recent = recent_[number % kRecent];
    if (recent.number != number || !recent.page) recent = {number, &pages_[number]};
    return *recent.page;
  }
  static void refine(Page&, uint32_t boundary);

  struct Recent {
    uintptr_t number;
    Page* page;
  };
  std::unordered_map<uintptr_t, Page> pages_;
  Recent recent_[kRecent] = {};
};

}  // namespace softmetal
