// Private (thread) arrays: their bounds, and the initialised bytes. A byte of state shadows each byte of a
// fiber's stack.
#include <string.h>
#include <sys/mman.h>

#include <algorithm>
#include <new>

#include "../dispatch.h"
#include "../module.h"
#include "../worker.h"
#include "checker.h"

namespace softmetal {

namespace {
enum State : char { kUntracked = 0, kUninitialised, kWritten };
}

PrivateMemory::PrivateMemory(uint32_t threads) : arrays_(threads), bytes_(size_t{threads} * kStackBytes) {
  void* map =
      mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (map == MAP_FAILED) throw std::bad_alloc();
  state_ = static_cast<char*>(map);
}

PrivateMemory::~PrivateMemory() { munmap(state_, bytes_); }

char* PrivateMemory::state(const Fiber& f, const void* address) {
  return state_ + size_t{f.index} * kStackBytes + (static_cast<const char*>(address) - f.stack_low);
}

void PrivateMemory::begin(const Fiber& f, void* array, uint64_t size, const char* name) {
  end(f, array, 0);
  arrays_[f.index].push_back({static_cast<char*>(array), size, name});
  memset(state(f, array), kUninitialised, size);
}

void PrivateMemory::end(const Fiber& f, void* array, uint64_t size) {
  memset(state(f, array), kUntracked, size);
  std::erase_if(arrays_[f.index], [&](const Array& a) { return a.low == array; });
}

void PrivateMemory::fill(const Fiber& f, void* array) {
  if (const Array* a = find(f, array)) memset(state(f, a->low), kWritten, a->size);
}

const PrivateMemory::Array* PrivateMemory::find(const Fiber& f, const void* address) const {
  for (const Array& a : arrays_[f.index])
    if (address >= a.low && address < a.low + a.size) return &a;
  return nullptr;
}

bool PrivateMemory::read(const Fiber& f, const void* address, uint64_t size) {
  return !memchr(state(f, address), kUninitialised, size);
}

void PrivateMemory::write(const Fiber& f, const void* address, uint64_t size) {
  char* first = state(f, address);
  std::replace(first, first + size, char{kUninitialised}, char{kWritten});
}

void Checker::begin_private(const Fiber& f, void* array, uint64_t size, const char* name) {
  private_.begin(f, array, size, name);
}
void Checker::end_private(const Fiber& f, void* array, uint64_t size) { private_.end(f, array, size); }
void Checker::fill_private(const Fiber& f, void* array) { private_.fill(f, array); }

void Checker::access_private(Fiber& f, void* address, uint64_t size, uint32_t kind, uintptr_t pc) {
  bool write = kind & SOFTMETAL_ACCESS_WRITE;
  softmetal_counters& counters = *softmetal_thread_counters();
  (write ? counters.bytes_written : counters.bytes_read)[static_cast<int>(Space::other)] += size;
  uint64_t room = static_cast<uint64_t>(f.stack_low + kStackBytes - static_cast<char*>(address));
  size = std::min(size, room);
  if (write) {
    private_.write(f, address, size);
  } else if (dispatch_.settings.checks & SOFTMETAL_CHECK_UNINIT && !(kind & SOFTMETAL_ACCESS_COPY) &&
             !private_.read(f, address, size)) {
    const PrivateMemory::Array* array = private_.find(f, address);
    std::string at = array ? " at byte " + std::to_string(static_cast<char*>(address) - array->low) +
                                 " of private array '" + array->name + "'"
                           : "";
    add("uninitialised", date(f, Space::other, pc - dispatch_.module->base, kind), {},
        "read of " + bytes(size) + at, "");
  }
}

void Checker::check_object(Fiber& f, void* address, uint64_t size, uint32_t kind, void* object,
                           uint64_t object_size, const char* name, uintptr_t pc) {
  int64_t offset = static_cast<char*>(address) - static_cast<char*>(object);
  bool inside = offset >= 0 && static_cast<uint64_t>(offset) + size <= object_size;
  if (inside || !(dispatch_.settings.checks & SOFTMETAL_CHECK_BOUNDS)) return;
  add("bounds", date(f, Space::other, pc - dispatch_.module->base, kind), {},
      std::string(kind & SOFTMETAL_ACCESS_WRITE ? "write of " : "read of ") + bytes(size) + " at byte " +
          std::to_string(offset) + " of variable '" + name + "', which has " + bytes(object_size),
      "");
  worker_->stop(&f);
}

void Checker::report_index(Fiber& f, const char* what, int64_t index, uint64_t count, const char* name,
                           uintptr_t pc) {
  if (!(dispatch_.settings.checks & SOFTMETAL_CHECK_BOUNDS)) return;
  add("bounds", date(f, Space::other, pc - dispatch_.module->base, 0), {},
      "index " + std::to_string(index) + " of " +
          (*name ? std::string(what) + " '" + name + "'" : std::string("a ") + what) + ", where it has " +
          std::to_string(count) + (count == 1 ? " element" : " elements"),
      "");
  worker_->stop(&f);
}

}  // namespace softmetal
