// The state of a running threadgroup: its threads (fibers), simdgroups and memory, and the scheduler that
// switches between them. A Worker belongs to one OS thread for the duration of a dispatch and runs one
// threadgroup after another.
#pragma once

#include <string>
#include <vector>

#include "abi.h"
#include "arena.h"
#include "fiber.h"
#include "stacks.h"
#include "tensor_layouts.h"

namespace softmetal {

class Checker;
struct Dispatch;

// The lanes that an operation requires: none, all that have not returned, or all 32.
enum class Needs : uint8_t { any, live, all };

struct Simdgroup;

struct Fiber : softmetal_lane {
  void* sp;
  char* stack_low;
  // The operation it waits in, for divergence decisions and messages.
  softmetal_simd_function function;
  int line;
  Needs needs;
  void* pc;        // its return address
  void** frame;    // in strict runs: of the runtime function that was called, {the caller's frame, the return
                   // address}
  uint32_t trail;  // hash of the simdgroup barriers passed without waiting (see softmetal_simdgroup_barrier)
  bool meets(const Fiber& other) const { return path == other.path; }  // in the same operation
  uint32_t bit() const { return 1u << lane; }
  Simdgroup& group() const;
};

// A set of lanes is a mask of 32 bits. A live lane is runnable, waiting (at a simdgroup operation) or
// at_barrier (of the threadgroup).
struct Simdgroup : softmetal_simdgroup {
  uint32_t existing, live, runnable, waiting, at_barrier;
  // The operation that the first waiting lane is in; `mixed` once another lane waits in a different one.
  uint64_t path;
  uint32_t trail;
  Needs needs;
  bool mixed;
  uint32_t threadgroup_epoch,
      device_epoch;          // simdgroup barriers passed that order threadgroup or device memory
  uint32_t execution_epoch;  // all of them
  Fiber* fibers;
};

inline Simdgroup& Fiber::group() const { return *static_cast<Simdgroup*>(simdgroup); }

struct Worker : softmetal_threadgroup {
  void prepare(Dispatch&);               // once a dispatch
  bool run_threadgroup(uint32_t index);  // false when the dispatch must stop: see `error`

  // Called on fibers.
  void rendezvous(Fiber* me);
  void threadgroup_barrier(Fiber* me, int flags);
  void threadgroup_operation(Fiber* me, softmetal_simd_function);
  void* variable(int id, size_t size, size_t align, const char* name, int line);
  void* argument(uint32_t index);
  [[noreturn]] void finish(Fiber* me);
  [[noreturn]] void stop(Fiber* me);  // ends the threadgroup and the dispatch; the fibers are abandoned
  [[noreturn]] void fail(Fiber* me, std::string message);

  Dispatch* dispatch = nullptr;
  Checker* checker = nullptr;   // set in checked runs
  softmetal_arguments bound{};  // copy of the launch's arguments at a known address
  uint32_t threadgroup_index = 0;
  uint32_t watched_threadgroup = 0, ticks = 0;  // of the watchdog
  uint32_t alive = 0, barrier_count = 0;
  uint64_t barrier_path = 0;
  bool in_operation = false;  // the barrier is an operation of the threadgroup
  uint32_t threadgroup_epoch = 0,
           device_epoch = 0;     // barriers passed that order threadgroup or device memory
  uint32_t execution_epoch = 0;  // all of them
  uint32_t order = 0;
  bool in_turn = false;  // lanes run in ascending order and no check observes the switches
  bool strict = false;   // a check that reports findings is enabled
  bool stopped = false;
  std::string error;
  std::vector<Simdgroup> groups;
  std::vector<Fiber> fibers;
  Stacks stacks;
  Arena arena;
  TensorPlaces places;
  std::vector<char> scratch;  // of tensor operations

 private:
  void reset_threads();
  void reset_memory();
  Fiber* first();
  Fiber* next(const Fiber* me);
  Fiber* next_random();
  Fiber* next_in_other_group(uint32_t start);
  void switch_to(Fiber* me, Fiber* to);
  void block(Fiber* me);
  bool complete(Simdgroup&, uint32_t lanes, Needs, Fiber* representative);
  bool complete_part(Simdgroup&);
  bool arrive_at_barrier(Fiber* me);
  void leave_barrier(Fiber* me);
  void pass_barrier();
  uint64_t random();

  void* main_sp_ = nullptr;
  int barrier_flags_ = 0;
  uint64_t random_state_ = 0;
};

// The fiber and worker that this OS thread runs; null outside kernels.
extern constinit thread_local Fiber* current_fiber __attribute__((tls_model("initial-exec")));
extern constinit thread_local Worker* current_worker __attribute__((tls_model("initial-exec")));

}  // namespace softmetal
