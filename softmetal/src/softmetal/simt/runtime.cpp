// The functions of the ABI that compiled kernels call.
#include "abi.h"
#include "worker.h"

namespace softmetal {
namespace {

constinit thread_local softmetal_counters counters __attribute__((tls_model("initial-exec"))) = {};

Worker& worker_of(Fiber* me) { return *static_cast<Worker*>(me->threadgroup); }

// Records the kernel's position for messages. Inlined: __builtin_* refer to the function that the kernel
// called.
__attribute__((always_inline)) inline void note_caller(Fiber* me) {
  me->pc = __builtin_return_address(0);
  me->frame = worker_of(me).strict ? static_cast<void**>(__builtin_frame_address(0)) : nullptr;
}

// The fast path: nearly always, one of lanes 1 to 30 arrives at the operation where the lanes before it wait,
// and the next lane runs. It is small enough to save no registers and to end in a jump to the switch.
// Worker::rendezvous handles the rest.
__attribute__((always_inline)) inline void arrive(Fiber* me, softmetal_simd_function function, int line,
                                                  Needs needs) {
  Simdgroup& group = me->group();
  Worker& worker = worker_of(me);
  me->function = function;
  me->line = line;
  me->needs = needs;
  uint32_t bit = me->bit();
  bool next_runs = group.runnable & bit << 1;
  if (worker.in_turn && group.waiting && group.path == me->path && group.trail == me->trail && next_runs)
      [[likely]] {
    me->pc = __builtin_return_address(0);
    group.runnable &= ~bit;
    group.waiting |= bit;
    current_fiber = me + 1;
    return softmetal_fiber_switch(&me->sp, me[1].sp);
  }
  note_caller(me);
  worker.rendezvous(me);
}

template <bool threadgroup, bool device>
void pass_simdgroup_barrier(softmetal_simdgroup* group) {
  auto* g = static_cast<Simdgroup*>(group);
  g->threadgroup_epoch += threadgroup;
  g->device_epoch += device;
  g->execution_epoch++;
  counters.simdgroup_barriers++;
}

softmetal_simd_function barrier_function(int flags) {
  bool threadgroup = flags & SOFTMETAL_MEM_THREADGROUP, device = flags & SOFTMETAL_MEM_DEVICE;
  if (threadgroup) return device ? pass_simdgroup_barrier<true, true> : pass_simdgroup_barrier<true, false>;
  return device ? pass_simdgroup_barrier<false, true> : pass_simdgroup_barrier<false, false>;
}

}  // namespace
}  // namespace softmetal

using namespace softmetal;

extern "C" {

softmetal_lane* softmetal_current_lane(void) { return current_fiber; }

void softmetal_rendezvous(softmetal_simd_function function, int line) {
  arrive(current_fiber, function, line, Needs::any);
}

void softmetal_rendezvous_all(softmetal_simd_function function, int line) {
  arrive(current_fiber, function, line, Needs::all);
}

void softmetal_rendezvous_threadgroup(softmetal_simd_function function, int line) {
  Fiber* me = current_fiber;
  me->line = line;
  note_caller(me);
  worker_of(me).threadgroup_operation(me, function);
}

void softmetal_threadgroup_barrier(int mem_flags, int line) {
  Fiber* me = current_fiber;
  Worker& worker = worker_of(me);
  Simdgroup& group = me->group();
  bool next_runs = group.runnable & me->bit() << 1;
  me->line = line;
  if (worker.in_turn && worker.barrier_count && worker.barrier_path == me->path && next_runs) [[likely]] {
    me->pc = __builtin_return_address(0);  // as in arrive()
    group.runnable &= ~me->bit();
    group.at_barrier |= me->bit();
    worker.barrier_count++;
    current_fiber = me + 1;
    return softmetal_fiber_switch(&me->sp, me[1].sp);
  }
  note_caller(me);
  worker.threadgroup_barrier(me, mem_flags);
}

// A barrier that orders no memory has no observable effect, so lanes wait only in strict runs. The trail
// records the passed barriers; lanes compare it at the next operation where they meet.
void softmetal_simdgroup_barrier(int mem_flags, int line) {
  Fiber* me = current_fiber;
  Worker& worker = worker_of(me);
  if (mem_flags & (SOFTMETAL_MEM_THREADGROUP | SOFTMETAL_MEM_DEVICE) || worker.strict) {
    arrive(me, barrier_function(mem_flags), line, Needs::live);
    return;
  }
  me->trail = me->trail * 31 + static_cast<uint32_t>(line);
  if (me->lane == 0) counters.simdgroup_barriers++;
}

void* softmetal_threadgroup_variable(int id, size_t size, size_t align, const char* name, int line) {
  return current_worker->variable(id, size, align, name, line);
}

void* softmetal_threadgroup_argument(int index) {
  return current_worker->argument(static_cast<uint32_t>(index));
}

void softmetal_count_exp(void) { counters.exps++; }

softmetal_counters* softmetal_thread_counters(void) { return &counters; }

}  // extern "C"
