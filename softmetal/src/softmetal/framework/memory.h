// Device memory: every block is between two inaccessible pages, ends at the second page (rounded to 16
// bytes), and is initialised to ones, which is NaN in every float type. Freed blocks are kept for reuse.
#pragma once
#include <cstddef>

namespace softmetal {

struct Block {
  char* mapping = nullptr;
  size_t mapped = 0;  // bytes, with the two guard pages
  void* contents = nullptr;
};

Block allocate_block(size_t bytes);  // contents is null when the system has no memory left
void free_block(const Block& block);
size_t cached_bytes();
void drop_cached_blocks();

}  // namespace softmetal
