// The signal handler behind FaultGuard.
#include "fault.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <mutex>

#include "dispatch.h"
#include "report.h"
#include "worker.h"

namespace softmetal {
namespace {

constexpr int kSignals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
constexpr size_t kSignalStackBytes = 64 * 1024;
constexpr uintptr_t kNullPage = 64 * 1024;  // addresses below are offsets from a null pointer

// Below the top of the stack, with the alignment that a call leaves.
#if defined(__x86_64__)
constexpr uintptr_t kLandingOffset = 64 + 8;
#else
constexpr uintptr_t kLandingOffset = 64;
#endif

struct sigaction previous[NSIG];

struct Fault {
  int signal;
  bool unspecific;  // a general protection fault: x86-64 does not report the address
  uintptr_t address, pc, sp;
};
thread_local Fault fault;
thread_local char* signal_stack = nullptr;

uintptr_t& register_pc(ucontext_t& c) {
#if defined(__x86_64__)
  return reinterpret_cast<uintptr_t&>(c.uc_mcontext.gregs[REG_RIP]);
#else
  return reinterpret_cast<uintptr_t&>(c.uc_mcontext.pc);
#endif
}

uintptr_t& register_sp(ucontext_t& c) {
#if defined(__x86_64__)
  return reinterpret_cast<uintptr_t&>(c.uc_mcontext.gregs[REG_RSP]);
#else
  return reinterpret_cast<uintptr_t&>(c.uc_mcontext.sp);
#endif
}

std::string describe() {
  Fiber& me = *current_fiber;
  Worker& worker = *current_worker;
  char address[32];
  snprintf(address, sizeof address, "0x%zx", static_cast<size_t>(fault.address));
  std::string what = std::string("access to invalid address ") + address;
  if (fault.signal == SIGFPE)
    what = "arithmetic exception";
  else if (fault.signal == SIGILL)
    what = "illegal instruction";
  else if (fault.unspecific)
    what = "misaligned access of a vector, or access to an address that cannot exist,";
  else if (fault.sp - reinterpret_cast<uintptr_t>(me.stack_low) > kStackBytes)
    what = "overrun of the thread's stack of " + std::to_string(kStackBytes) + " bytes";
  else if (fault.address < kNullPage)
    what += " (a buffer that is not bound?)";
  return "fault: kernel '" + std::string(worker.dispatch->launch.kernel->name) + "': " + what + " at " +
         source_of(worker.dispatch->module, {fault.pc + 1}) + " by " + thread_name(worker, me);
}

// Runs on the fiber's stack instead of the faulting instruction; the stack's contents are abandoned.
void land() { current_worker->fail(current_fiber, describe()); }

void on_signal(int number, siginfo_t* info, void* data) {
  if (!current_fiber) {  // not a kernel's fault: restore the previous handler
    sigaction(number, &previous[number], nullptr);
    if (info->si_code <= 0) raise(number);
    return;  // the instruction faults again
  }
  auto& context = *static_cast<ucontext_t*>(data);
  fault = {number, number == SIGSEGV && info->si_code == SI_KERNEL,
           reinterpret_cast<uintptr_t>(info->si_addr), register_pc(context), register_sp(context)};
  continue_at(data, &land);
}

// Others (Python's faulthandler) may install handlers between dispatches; this reinstalls ours, which
// forwards their faults.
void install() {
  static std::mutex mutex;
  std::lock_guard lock(mutex);
  for (int number : kSignals) {
    struct sigaction now{};
    sigaction(number, nullptr, &now);
    if (now.sa_flags & SA_SIGINFO && now.sa_sigaction == on_signal) continue;
    previous[number] = now;
    struct sigaction ours{};
    ours.sa_sigaction = on_signal;
    ours.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(number, &ours, nullptr);
  }
}

}  // namespace

uintptr_t program_counter(void* context) { return register_pc(*static_cast<ucontext_t*>(context)); }

void** frame_pointer(void* context) {
  auto& registers = *static_cast<ucontext_t*>(context);
#if defined(__x86_64__)
  return reinterpret_cast<void**>(registers.uc_mcontext.gregs[REG_RBP]);
#else
  return reinterpret_cast<void**>(registers.uc_mcontext.regs[29]);
#endif
}

uintptr_t top_of_stack(void* context) {
  return *reinterpret_cast<const uintptr_t*>(register_sp(*static_cast<ucontext_t*>(context)));
}

void continue_at(void* context, void (*landing)()) {
  auto& registers = *static_cast<ucontext_t*>(context);
  register_pc(registers) = reinterpret_cast<uintptr_t>(landing);
  register_sp(registers) =
      reinterpret_cast<uintptr_t>(current_fiber->stack_low) + kStackBytes - kLandingOffset;
}

// The handler needs its own stack: the fiber's may have overflowed.
FaultGuard::FaultGuard() {
  install();
  stack_t now{};
  sigaltstack(nullptr, &now);
  if (!(now.ss_flags & SS_DISABLE)) return;
  if (!signal_stack) {
    void* map = mmap(nullptr, kSignalStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (map == MAP_FAILED) return;
    signal_stack = static_cast<char*>(map);
  }
  stack_t ours{};
  ours.ss_sp = signal_stack;
  ours.ss_size = kSignalStackBytes;
  own_stack_ = sigaltstack(&ours, nullptr) == 0;
}

FaultGuard::~FaultGuard() {
  if (!own_stack_) return;
  stack_t off{};
  off.ss_flags = SS_DISABLE;
  sigaltstack(&off, nullptr);
}

}  // namespace softmetal
