// Guarded, poisoned, reusable blocks of device memory.
#include "memory.h"

#include <sys/mman.h>

#include <cstring>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace softmetal {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kAlignment = 16;  // of contents: an overrun by 16 bytes or more faults
constexpr size_t kMaxCachedBytes = size_t(256) << 20;
constexpr unsigned char kPoison = 0xFF;

size_t round_up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }

struct Cache {
  std::mutex mutex;
  std::unordered_map<size_t, std::vector<char*>> mappings;  // by mapped size
  size_t bytes = 0;
};
Cache& cache() {
  static Cache* instance = new Cache;  // never destroyed: buffers may outlive static destructors
  return *instance;
}

char* take_cached(size_t mapped) {
  std::lock_guard lock(cache().mutex);
  auto found = cache().mappings.find(mapped);
  if (found == cache().mappings.end() || found->second.empty()) return nullptr;
  char* mapping = found->second.back();
  found->second.pop_back();
  cache().bytes -= mapped;
  return mapping;
}

char* map_guarded(size_t mapped) {
  void* mapping = mmap(nullptr, mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping == MAP_FAILED) return nullptr;
  if (mprotect(static_cast<char*>(mapping) + kPage, mapped - 2 * kPage, PROT_READ | PROT_WRITE) != 0) {
    munmap(mapping, mapped);
    return nullptr;
  }
  return static_cast<char*>(mapping);
}

}  // namespace

Block allocate_block(size_t bytes) {
  size_t body = round_up(bytes ? bytes : 1, kPage), mapped = body + 2 * kPage;
  char* mapping = take_cached(mapped);
  if (!mapping) mapping = map_guarded(mapped);
  if (!mapping) return {};
  memset(mapping + kPage, kPoison, body);
  return {mapping, mapped, mapping + kPage + body - round_up(bytes, kAlignment)};
}

void free_block(const Block& block) {
  {
    std::lock_guard lock(cache().mutex);
    if (cache().bytes + block.mapped <= kMaxCachedBytes) {
      cache().mappings[block.mapped].push_back(block.mapping);
      cache().bytes += block.mapped;
      return;
    }
  }
  munmap(block.mapping, block.mapped);
}

size_t cached_bytes() {
  std::lock_guard lock(cache().mutex);
  return cache().bytes;
}

void drop_cached_blocks() {
  std::lock_guard lock(cache().mutex);
  for (auto& [mapped, mappings] : cache().mappings)
    for (char* mapping : mappings) munmap(mapping, mapped);
  cache().mappings.clear();
  cache().bytes = 0;
}

}  // namespace softmetal
