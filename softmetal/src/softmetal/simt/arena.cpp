// Placement and poisoning of threadgroup memory.
#include "arena.h"

#include <string.h>
#include <sys/mman.h>

#include <algorithm>
#include <new>

#include "abi.h"

namespace softmetal {

namespace {
constexpr uint32_t kAlign = 16, kNarrowRedZone = 64, kWideRedZone = 32768;
constexpr size_t kGuardBytes = 1 << 16;
}  // namespace

Arena::Arena() {
  void* map = mmap(nullptr, kCapacity + 2 * kGuardBytes, PROT_NONE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (map == MAP_FAILED) throw std::bad_alloc();
  base_ = static_cast<char*>(map) + kGuardBytes;
  mprotect(base_, kCapacity, PROT_READ | PROT_WRITE);
}

Arena::~Arena() { munmap(base_ - kGuardBytes, kCapacity + 2 * kGuardBytes); }

void Arena::begin_dispatch(bool wide_red_zones) {
  red_zone_ = wide_red_zones ? kWideRedZone : kNarrowRedZone;
  dirty_ = std::max(dirty_, used_);
  used_ = total_ = 0;
  arrays_.clear();
  places_.clear();
}

// Bytes of ones are a NaN in every floating-point type.
void Arena::poison() {
  memset(base_, 0xff, std::max(dirty_, used_) + red_zone_);
  dirty_ = 0;
}

int Arena::place(uint32_t id, size_t size, size_t align, std::string name, int line) {
  uint32_t to = std::max<uint32_t>(static_cast<uint32_t>(align), kAlign);
  total_ = (total_ + to - 1) / to * to;
  if (size > SOFTMETAL_MAX_THREADGROUP_BYTES - std::min<size_t>(total_, SOFTMETAL_MAX_THREADGROUP_BYTES)) {
    total_ += static_cast<uint32_t>(std::min<size_t>(size, 1u << 30));
    return -1;
  }
  total_ += static_cast<uint32_t>(size);
  uint32_t offset = (used_ + red_zone_ + to - 1) / to * to;
  uint32_t end = offset + static_cast<uint32_t>(size) + red_zone_;
  if (end > kCapacity) return -1;
  // The array and the zone behind it have not been poisoned yet in this threadgroup.
  memset(base_ + used_, 0xff, end - used_);
  used_ = offset + static_cast<uint32_t>(size);
  arrays_.push_back({offset, static_cast<uint32_t>(size), std::move(name), line});
  if (places_.size() <= id) places_.resize(id + 1, -1);
  places_[id] = static_cast<int>(arrays_.size()) - 1;
  return places_[id];
}

}  // namespace softmetal
