// The scheduler: chooses the next fiber, completes simdgroup operations and barriers, and detects divergence.
#include "worker.h"

#include <stdlib.h>

#include "checks/checker.h"
#include "dispatch.h"
#include "path.h"
#include "report.h"

namespace softmetal {

constinit thread_local Fiber* current_fiber __attribute__((tls_model("initial-exec"))) = nullptr;
constinit thread_local Worker* current_worker __attribute__((tls_model("initial-exec"))) = nullptr;

namespace {

constexpr uint32_t kAllLanes = ~0u;
// Threadgroup arguments share the arena's table of variables; their identifiers are above any translation
// unit's.
constexpr uint32_t kFirstArgumentId = 1u << 16;

uint32_t lowest(uint32_t mask) { return static_cast<uint32_t>(__builtin_ctz(mask)); }
uint32_t highest(uint32_t mask) { return 31u - static_cast<uint32_t>(__builtin_clz(mask)); }

void fiber_main() {
  Fiber* me = current_fiber;
  Worker* worker = current_worker;
  worker->dispatch->launch.kernel->entry(worker->arguments);
  worker->finish(me);
}

}  // namespace

// ---- a dispatch, a threadgroup

void Worker::prepare(Dispatch& d) {
  dispatch = &d;
  checker = d.checker;
  order = d.settings.order;
  in_turn = order == SOFTMETAL_FORWARD && !checker;
  strict = d.settings.checks & kFindingChecks;
  stopped = false;
  error.clear();
  bound = *d.launch.arguments;
  arguments = &bound;
  if (checker) checker->rename(bound);
  grid = d.launch.grid;
  size = d.launch.threads;
  uint32_t count = size.x * size.y * size.z;
  uint32_t group_count = (count + SOFTMETAL_SIMD_WIDTH - 1) / SOFTMETAL_SIMD_WIDTH;
  threads = count;
  simdgroups = group_count;
  if (groups.size() < group_count) groups.resize(group_count);
  if (fibers.size() < count) fibers.resize(count);
  stacks.reserve(count);
  for (uint32_t i = 0; i < count; i++) {
    Fiber& f = fibers[i];
    f.simdgroup = &groups[i / SOFTMETAL_SIMD_WIDTH];
    f.threadgroup = this;
    f.position = {i % size.x, i / size.x % size.y, i / size.x / size.y};
    f.index = i;
    f.lane = i % SOFTMETAL_SIMD_WIDTH;
    f.stack_low = stacks.low(i);
  }
  for (uint32_t g = 0; g < group_count; g++) {
    groups[g].index = g;
    groups[g].fibers = &fibers[g * SOFTMETAL_SIMD_WIDTH];
    groups[g].next = g + 1 < group_count ? &groups[g + 1] : nullptr;
  }
  arena.begin_dispatch(checker != nullptr);
}

void Worker::reset_threads() {
  for (uint32_t g = 0; g < simdgroups; g++) {
    Simdgroup& group = groups[g];
    uint32_t lanes = threads - g * SOFTMETAL_SIMD_WIDTH;
    group.existing = group.live = group.runnable =
        lanes >= SOFTMETAL_SIMD_WIDTH ? kAllLanes : (1u << lanes) - 1;
    group.waiting = group.at_barrier = 0;
    group.threadgroup_epoch = group.device_epoch = group.execution_epoch = 0;
  }
  for (uint32_t i = 0; i < threads; i++) {
    fibers[i].trail = 0;
    fibers[i].path = 0;
    fibers[i].call = nullptr;
    fibers[i].sp = prepare_fiber(stacks.top(i), fiber_main);
  }
  alive = threads;
  barrier_count = 0;
  barrier_flags_ = 0;
  threadgroup_epoch = device_epoch = execution_epoch = 0;
}

void Worker::reset_memory() {
  arena.poison();
  for (uint32_t i = 0; i < SOFTMETAL_MAX_BUFFERS; i++)
    if (uint32_t bytes = bound.threadgroup_length[i]; bytes && arena.find(kFirstArgumentId + i) < 0)
      arena.place(kFirstArgumentId + i, bytes, 16, "[[threadgroup(" + std::to_string(i) + ")]]", 0);
}

bool Worker::run_threadgroup(uint32_t index) {
  threadgroup_index = index;
  position = {index % grid.x, index / grid.x % grid.y, index / grid.x / grid.y};
  random_state_ = (dispatch->settings.seed + 1) * 0x9E3779B97F4A7C15ull + index * 0xBF58476D1CE4E5B9ull | 1;
  reset_memory();
  reset_threads();
  if (checker) checker->begin_threadgroup(*this);
  softmetal_thread_counters()->threadgroups++;
  current_worker = this;
  current_fiber = first();
  softmetal_fiber_switch(&main_sp_, current_fiber->sp);
  current_fiber = nullptr;
  current_worker = nullptr;
  return !stopped;
}

// ---- order

uint64_t Worker::random() {  // xorshift
  random_state_ ^= random_state_ << 13;
  random_state_ ^= random_state_ >> 7;
  return random_state_ ^= random_state_ << 17;
}

Fiber* Worker::first() {
  if (order == SOFTMETAL_RANDOM) return next_random();
  return next_in_other_group(order == SOFTMETAL_REVERSE ? simdgroups - 1 : 0);
}

// Prefers the same simdgroup: its lanes run in turn up to the next operation, and the last one completes it.
inline Fiber* Worker::next(const Fiber* me) {
  Simdgroup& group = me->group();
  uint32_t ready = group.runnable;
  if (order == SOFTMETAL_RANDOM) return next_random();
  if (!ready) return next_in_other_group(group.index);
  if (order == SOFTMETAL_REVERSE) {
    uint32_t below = ready & (me->bit() - 1);
    return &group.fibers[highest(below ? below : ready)];
  }
  uint32_t above = ready & ~(me->bit() | (me->bit() - 1));
  return &group.fibers[lowest(above ? above : ready)];
}

Fiber* Worker::next_random() {
  uint32_t start = random() % simdgroups;
  for (uint32_t k = 0; k < simdgroups; k++) {
    Simdgroup& group = groups[(start + k) % simdgroups];
    if (!group.runnable && group.waiting) complete_part(group);
    if (stopped) return nullptr;
    uint32_t ready = group.runnable;
    if (!ready) continue;
    for (uint32_t skip = random() % __builtin_popcount(ready); skip; skip--) ready &= ready - 1;
    return &group.fibers[lowest(ready)];
  }
  abort();  // not reached, as below
}

Fiber* Worker::next_in_other_group(uint32_t start) {
  for (uint32_t k = 0; k < simdgroups; k++) {
    bool reverse = order == SOFTMETAL_REVERSE;
    Simdgroup& group = groups[(reverse ? start + simdgroups - k : start + k) % simdgroups];
    if (!group.runnable && group.waiting) complete_part(group);
    if (stopped) return nullptr;
    if (group.runnable) return &group.fibers[reverse ? highest(group.runnable) : lowest(group.runnable)];
  }
  abort();  // not reached: complete_part ends every operation, and a barrier opens when all live threads wait
            // at it
}

// The only caller of softmetal_fiber_switch on fibers: a single return address keeps the return predictor
// accurate.
__attribute__((noinline)) void Worker::switch_to(Fiber* me, Fiber* to) {
  if (checker) checker->settle();
  current_fiber = to;
  softmetal_fiber_switch(&me->sp, to->sp);
}

inline void Worker::block(Fiber* me) {
  Fiber* to = next(me);
  if (!to) stop(me);
  if (to != me) switch_to(me, to);
}

void Worker::stop(Fiber* me) {
  stopped = true;
  softmetal_fiber_switch(&me->sp, main_sp_);
  abort();
}

void Worker::fail(Fiber* me, std::string message) {
  error = std::move(message);
  stop(me);
}

void Worker::finish(Fiber* me) {
  if (checker) checker->settle();
  Simdgroup& group = me->group();
  group.live &= ~me->bit();
  group.runnable &= ~me->bit();
  alive--;
  if (group.waiting && group.waiting == group.live && !group.mixed)
    complete(group, group.live, group.needs, &group.fibers[lowest(group.live)]);
  if (barrier_count && !stopped) {
    error = barrier_missed_message(*this, *me);
    stopped = true;
  }
  Fiber* to = alive && !stopped ? next(me) : nullptr;
  if (to) switch_to(me, to);
  softmetal_fiber_switch(&me->sp, main_sp_);
  abort();
}

// ---- simdgroup operations

void Worker::rendezvous(Fiber* me) {
  Simdgroup& group = me->group();
  if (!group.waiting) {
    group.path = me->path;
    group.trail = me->trail;
    group.needs = me->needs;
    group.mixed = false;
  } else if (group.path != me->path || group.trail != me->trail) {
    group.mixed = true;
  }
  group.runnable &= ~me->bit();
  group.waiting |= me->bit();
  if (group.waiting != group.live || group.mixed) {
    block(me);
    return;
  }
  if (!complete(group, group.live, group.needs, me)) stop(me);
  if (order == SOFTMETAL_RANDOM) block(me);
}

// Runs the operation for these lanes and resumes them. Returns false if required lanes are absent, or if one
// of them reads an undefined value.
inline bool Worker::complete(Simdgroup& group, uint32_t lanes, Needs needs, Fiber* representative) {
  uint32_t needed = needs == Needs::all    ? kAllLanes
                    : needs == Needs::live ? (strict ? group.existing : group.live)
                                           : lanes;
  if (lanes != needed) [[unlikely]] {
    error = divergence_message(*this, group, lanes, *representative);
    stopped = true;
    return false;
  }
  group.active = lanes;
  group.undefined = 0;
  if (representative->function) representative->function(&group);
  if (strict && group.undefined) [[unlikely]] {
    error = inactive_source_message(*this, group);
    stopped = true;
    return false;
  }
  group.waiting &= ~lanes;
  group.runnable |= lanes;
  return true;
}

// Called if no lane of the simdgroup can run and the waiting lanes are in different operations. An operation
// in divergent flow involves the lanes that reach it. Lanes that are behind in the program go first, and meet
// the others where the flow joins again.
bool Worker::complete_part(Simdgroup& group) {
  Fiber* behind = nullptr;
  for (uint32_t m = group.waiting; m; m &= m - 1) {
    Fiber* f = &group.fibers[lowest(m)];
    if (!behind || (!f->meets(*behind) && is_behind(f->call, behind->call))) behind = f;
  }
  uint32_t lanes = 0;
  bool trails_differ = false;
  for (uint32_t m = group.waiting; m; m &= m - 1) {
    Fiber* f = &group.fibers[lowest(m)];
    if (!f->meets(*behind)) continue;
    lanes |= f->bit();
    trails_differ |= f->trail != behind->trail;
  }
  if (trails_differ) {
    error = divergence_message(*this, group, lanes, *behind);
    stopped = true;
    return false;
  }
  if (!complete(group, lanes, behind->needs, behind)) return false;
  group.mixed = true;  // makes the next decision happen here again
  return true;
}

// ---- barriers

void Worker::threadgroup_barrier(Fiber* me, int flags) {
  barrier_flags_ = flags;
  in_operation = false;
  if (!arrive_at_barrier(me)) return;
  pass_barrier();
  leave_barrier(me);
}

// Not a barrier, and orders no memory: its accesses race like the threads' own.
void Worker::threadgroup_operation(Fiber* me, softmetal_simd_function function) {
  in_operation = true;
  if (!arrive_at_barrier(me)) return;
  function(&groups[0]);
  leave_barrier(me);
}

// Returns whether all threads have arrived; otherwise waits for them.
bool Worker::arrive_at_barrier(Fiber* me) {
  Simdgroup& group = me->group();
  if (barrier_count && barrier_path != me->path) fail(me, barrier_mismatch_message(*this, *me));
  if (alive != threads) fail(me, barrier_missed_message(*this, *me));
  barrier_path = me->path;
  group.runnable &= ~me->bit();
  group.at_barrier |= me->bit();
  if (++barrier_count == alive) return true;
  block(me);
  return false;
}

void Worker::pass_barrier() {
  softmetal_thread_counters()->threadgroup_barriers++;
  execution_epoch++;
  if (barrier_flags_ & SOFTMETAL_MEM_THREADGROUP) threadgroup_epoch++;
  if (barrier_flags_ & SOFTMETAL_MEM_DEVICE) device_epoch++;
}

void Worker::leave_barrier(Fiber* me) {
  barrier_count = 0;
  for (uint32_t g = 0; g < simdgroups; g++) {
    groups[g].runnable = groups[g].at_barrier;
    groups[g].at_barrier = 0;
  }
  Fiber* to = first();
  if (!to) stop(me);
  if (to != me) switch_to(me, to);
}

// ---- threadgroup memory

void* Worker::variable(int id, size_t bytes, size_t align, const char* name, int line) {
  int array = arena.find(static_cast<uint32_t>(id));
  if (array < 0) [[unlikely]] {
    array = arena.place(static_cast<uint32_t>(id), bytes, align, name, line);
    if (array < 0) fail(current_fiber, threadgroup_memory_message(*this, name, line));
  }
  return arena.address(array);
}

void* Worker::argument(uint32_t index) {
  int array = arena.find(kFirstArgumentId + index);
  return array < 0 ? nullptr : arena.address(array);
}

}  // namespace softmetal
