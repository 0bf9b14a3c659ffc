// The checks of one dispatch whose module was compiled in checked mode. It is called before every access of a
// kernel.
//
// Races. Two accesses of one byte, one of them a write, race unless they are ordered. Within a threadgroup
// only barriers order accesses: threadgroup_barrier orders everything before it with everything after it,
// simdgroup_barrier within its simdgroup, both only for the memory named by their mem_flags. Nothing orders
// accesses of different threadgroups. An access is therefore dated by the barriers passed (its epochs), and a
// shadow cell keeps the last write and representative reads. This finds a race for any execution order of the
// threads.
//
// Two writes of the same value are not a race. Callbacks run before the store and do not know its value, so a
// conflicting write is kept as *pending* with the current bytes of memory (the other thread's value: fibers
// switch only inside the runtime, never between callback and store). At that fiber's next event the store has
// happened and memory is compared: unchanged means the same value. A conflict of a write with a read is
// always a race.
//
// Two atomic accesses never race; an atomic and a plain access do. Any barrier orders a read before it with a
// write after it, even if its mem_flags do not name the memory.
//
// Bounds. A kernel does not see the addresses of its buffers: each buffer has its own range of 2^48
// addresses, which exist on no machine, with the buffer in the middle. Each access is translated, so a stray
// access is attributed to its buffer at any distance. Slots bound to one buffer share its range in all
// address spaces, because kernels compare pointers, and one slot may read what another writes.
#pragma once

#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "abi.h"
#include "footprint.h"
#include "private.h"
#include "shadow.h"

namespace softmetal {

struct Dispatch;
struct Fiber;
struct Module;
struct Worker;

std::string bytes(uint64_t size);  // "4 bytes"

enum class Space : uint8_t { other, device, constant, threadgroup };

class Checker {
 public:
  explicit Checker(Dispatch&);
  void begin_threadgroup(Worker&);
  void rename(softmetal_arguments&) const;  // to the addresses for the kernel
  // Called before every access of device, constant or threadgroup memory, with the return address of its
  // callback. Returns the host address of the bytes.
  void* access(Fiber&, void* address, uint64_t size, uint32_t kind, uintptr_t pc);
  void check_alignment(Fiber&, void* address, uint64_t alignment, uintptr_t pc);

  void begin_private(const Fiber&, void* array, uint64_t size, const char* name);
  void end_private(const Fiber&, void* array, uint64_t size);
  void fill_private(const Fiber&, void* array);
  void access_private(Fiber&, void* address, uint64_t size, uint32_t kind, uintptr_t pc);
  void check_object(Fiber&, void* address, uint64_t size, uint32_t kind, void* object, uint64_t object_size,
                    const char* name, uintptr_t pc);
  void report_index(Fiber&, const char* what, int64_t index, uint64_t count, const char* name, uintptr_t pc);

  void settle();  // decides the pending writes; called before another fiber runs
  std::vector<std::string> findings() const;

 private:
  struct Region {       // memory accessible through one argument
    uintptr_t low = 0;  // host address
    uint64_t size = 0;
    Space space = Space::device;
    bool writable = false;  // through a slot of that buffer
    uint32_t index = 0;
    const char* name = nullptr;  // null: no argument of the kernel
    // The lowest index of the slots bound to its buffer, and the start of the first binding.
    uint32_t range = 0;
    uintptr_t first = 0;
    bool is_shared = false;
  };
  struct Place {  // location of an address
    Space space = Space::other;
    bool valid = false, writable = false;
    const Region* region = nullptr;
    int array = -1;
    int64_t offset = 0;  // in the region or array
    uintptr_t real = 0;
  };
  struct Pending {
    uint32_t size;
    unsigned char before[16];
    Access mine, other;
    Place place;
  };
  struct Finding {
    const char* kind;
    std::string what, joint;  // joint: between the positions of the two accesses
    Access mine, other;
  };

  Place locate(uintptr_t address, uint64_t size) const;
  Place locate_in_arena(uintptr_t address, uint64_t size) const;
  static bool shares_range(const Region&, const Region&);
  uintptr_t seen_as(const Region&) const;
  const Region* nearest(uint32_t range, uintptr_t address) const;
  bool belongs_to_runtime(uintptr_t address) const;
  void require_alignment(Fiber&, const Place&, uint64_t alignment, uint32_t kind, uintptr_t pc);
  void report_stray(Fiber&, const Place&, uintptr_t address, uint64_t size, uint32_t kind, uintptr_t pc);
  void check_order(const Fiber&, const Place&, uint32_t size, uint32_t kind, uintptr_t pc);
  bool ordered(const Access& earlier, const Access& now, Space) const;
  bool races(const Access& earlier, const Access& now, Space) const;
  void note(Cell&, const Access& now, Space) const;
  void hold(const Place&, uint32_t size, const Access& now, const Access& other);
  Access date(const Fiber&, Space, uintptr_t pc, uint32_t kind) const;
  std::string describe(const Place&) const;
  std::string describe_stray(const Place&, uintptr_t address, uint64_t size) const;
  std::string who(const Access&) const;
  void add(const char* kind, const Access& mine, const Access& other, std::string what, std::string joint);

  Dispatch& dispatch_;
  Worker* worker_ = nullptr;
  Region regions_[SOFTMETAL_MAX_BUFFERS];
  PrivateMemory private_;
  Shadow shadow_;
  Footprint footprint_;  // of the threadgroup, under SOFTMETAL_COUNT_DISTINCT
  std::vector<Pending> pending_;
  std::vector<Finding> findings_;
  std::set<std::tuple<std::string, uint32_t, uint32_t>> seen_;
};

}  // namespace softmetal
