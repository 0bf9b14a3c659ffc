// The checks of one dispatch whose module was compiled in checked mode: every access of a kernel comes here
// before it happens.
//
// Races. Two accesses of one byte, one of them a write, race unless something orders them. Within a
// threadgroup only barriers do: threadgroup_barrier orders everything before it with everything after it,
// simdgroup_barrier does so within its simdgroup, each only for the memory named by its mem_flags. Between
// threadgroups nothing does. So an access is dated by the barriers passed (its epochs) and a shadow cell
// keeps the last write and representative reads: this finds a race whatever the order in which threads happen
// to run.
//
// Two writes of the same value are no race. Callbacks come before the store and do not say what it stores, so
// a conflicting write is held back as *pending* with the bytes that memory holds (the other thread's value:
// fibers switch only inside the runtime, never between callback and store). At that fiber's next event the
// store has happened and memory is compared: unchanged means the same value. A conflict of a write with a
// read is always a race.
#pragma once

#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "abi.h"
#include "shadow.h"

namespace softmetal {

struct Dispatch;
struct Fiber;
struct Module;
struct Worker;

std::string bytes(uint32_t size);  // "4 bytes"

enum class Space : uint8_t { other, device, constant, threadgroup };

class Checker {
 public:
  explicit Checker(Dispatch&);
  void begin_threadgroup(Worker&);
  void access(Fiber&, uintptr_t address, uint32_t size, bool write, uintptr_t pc);
  void misaligned(Fiber&, uintptr_t address, uint32_t alignment, uintptr_t pc);
  void settle();  // decides the pending write; called before another fiber runs
  std::vector<std::string> findings() const;

 private:
  struct Region {  // what one argument gives access to
    uintptr_t low, high;
    Space space;
    bool writable;
    uint32_t index;
    const char* name;
  };
  struct Place {  // where an address is
    Space space = Space::other;
    bool valid = false, writable = false;
    const Region* region = nullptr;
    int array = -1;
  };
  struct Pending {
    bool set = false;
    uintptr_t address;
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

  Place locate(uintptr_t address, uint32_t size) const;
  Place locate_in_arena(uintptr_t address, uint32_t size) const;
  bool belongs_to_runtime(uintptr_t address) const;
  void report_stray(Fiber&, const Place&, uintptr_t address, uint32_t size, bool write, uintptr_t pc);
  void check_order(const Fiber&, const Place&, uintptr_t address, uint32_t size, bool write, uintptr_t pc);
  bool ordered(const Access& earlier, const Access& now, Space) const;
  void note_read(Cell&, const Access& now, Space) const;
  void hold(const Place&, uintptr_t address, uint32_t size, const Access& now, const Access& other);
  Access date(const Fiber&, Space, uintptr_t pc) const;
  std::string describe(const Place&, uintptr_t address) const;
  std::string describe_stray(uintptr_t address, uint32_t size) const;
  std::string who(const Access&) const;
  void add(const char* kind, const Access& mine, const Access& other, std::string what, std::string joint);

  Dispatch& dispatch_;
  Worker* worker_ = nullptr;
  std::vector<Region> regions_;
  Shadow shadow_;
  Pending pending_;
  std::vector<Finding> findings_;
  std::set<std::tuple<std::string, uint32_t, uint32_t>> seen_;
};

}  // namespace softmetal
