// The timer behind Watchdog, and its signal handler.
#include "watchdog.h"

#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <mutex>

#include "dispatch.h"
#include "fault.h"
#include "module.h"
#include "report.h"
#include "worker.h"

namespace softmetal {
namespace {

constexpr int kTicks = 4;  // a threadgroup is stopped at the fourth tick that finds it running
constexpr long kRetryNanoseconds = 1'000'000;

thread_local timer_t this_timer;
// Return addresses at the interruption, read in the handler because landing overwrites the stack.
thread_local CallChain interrupted;

int tick_signal() { return SIGRTMIN + 7; }

std::string describe() {
  const Fiber& me = *current_fiber;
  const Worker& worker = *current_worker;
  const Module* module = worker.dispatch->module;
  std::string place = source_of(module, {interrupted.begin(), interrupted.end()});
  char seconds[32];
  snprintf(seconds, sizeof seconds, "%g", worker.dispatch->settings.watchdog_ms / 1000.0);
  return "watchdog: kernel '" + std::string(worker.dispatch->launch.kernel->name) +
         "': " + thread_name(worker, me) + " is at " + place + ", and its threadgroup has not ended after " +
         seconds +
         " s of processor time; an endless loop? (SOFTMETAL_WATCHDOG sets the seconds, 0 for no limit)";
}

void land() { current_worker->fail(current_fiber, describe()); }

// The runtime and the C library may hold locks, so only kernel code is stopped. In other code, the handler
// retries a moment later.
void on_tick(int, siginfo_t*, void* data) {
  if (!current_fiber) return;
  Worker& worker = *current_worker;
  if (worker.watched_threadgroup != worker.threadgroup_index || !worker.ticks) {
    worker.watched_threadgroup = worker.threadgroup_index;
    worker.ticks = 1;
    return;
  }
  if (++worker.ticks <= kTicks) return;
  uintptr_t at = program_counter(data);
  const Module* module = worker.dispatch->module;
  if (!module || module->contains(at)) {
    // In the first instructions of a function its return address is on top of the stack. Optimised code has
    // instructions without a line: without linked frames, neighbouring addresses are used. The last fallback
    // is the thread's previous operation.
    interrupted = {at + 1, top_of_stack(data), at - 1, at - 3, at - 6, at + 5};
    if (worker.strict) walk_frames(*current_fiber, frame_pointer(data), 2, interrupted);
    interrupted.back() = reinterpret_cast<uintptr_t>(current_fiber->pc);
    continue_at(data, &land);
    return;
  }
  itimerspec soon{};
  soon.it_value.tv_nsec = kRetryNanoseconds;
  timer_settime(this_timer, 0, &soon, nullptr);
}

void install() {
  static std::once_flag once;
  std::call_once(once, [] {
    struct sigaction action{};
    action.sa_sigaction = on_tick;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART;
    sigaction(tick_signal(), &action, nullptr);
  });
}

}  // namespace

Watchdog::Watchdog(Worker& worker, unsigned milliseconds) {
  if (!milliseconds) return;
  install();
  worker.ticks = 0;
  sigevent event{};
  event.sigev_notify = SIGEV_THREAD_ID;
  event.sigev_signo = tick_signal();
  event._sigev_un._tid = static_cast<pid_t>(syscall(SYS_gettid));
  if (timer_create(CLOCK_THREAD_CPUTIME_ID, &event, &timer_) != 0) return;
  armed_ = true;
  this_timer = timer_;
  auto nanoseconds = static_cast<uint64_t>(milliseconds) * 1'000'000 / kTicks;
  timespec interval{static_cast<time_t>(nanoseconds / 1'000'000'000),
                    static_cast<long>(nanoseconds % 1'000'000'000)};
  itimerspec spec{interval, interval};
  timer_settime(timer_, 0, &spec, nullptr);
}

Watchdog::~Watchdog() {
  if (armed_) timer_delete(timer_);
}

}  // namespace softmetal
