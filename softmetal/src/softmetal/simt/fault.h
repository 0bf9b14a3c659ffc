// Hardware faults inside kernels (null or wild pointers, overrun of a thread's stack, integer division by
// zero) as errors of the dispatch.
#pragma once

#include <stdint.h>

namespace softmetal {

// In a signal handler that interrupted a fiber, by the handler's third argument: where it was, its frame, the
// word on top of its stack, and to let it go on
// in `landing`, at the top of its stack, what was on it being abandoned.
uintptr_t program_counter(void* context);
void** frame_pointer(void* context);
uintptr_t top_of_stack(void* context);
void continue_at(void* context, void (*landing)());

// While it lives, a fault of a kernel on this OS thread ends the threadgroup with a message. Faults elsewhere
// go where they went before.
class FaultGuard {
 public:
  FaultGuard();
  ~FaultGuard();
  FaultGuard(const FaultGuard&) = delete;

 private:
  bool own_stack_ = false;
};

}  // namespace softmetal
