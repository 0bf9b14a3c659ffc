// Hardware faults inside kernels (null or wild pointers, overrun of a thread's stack, integer division by
// zero) as errors of the dispatch.
#pragma once

#include <stdint.h>

namespace softmetal {

// For a signal handler that interrupted a fiber, with the handler's third argument: the fiber's program
// counter, frame and top word of the stack. continue_at() resumes it in `landing` with an empty stack.
uintptr_t program_counter(void* context);
void** frame_pointer(void* context);
uintptr_t top_of_stack(void* context);
void continue_at(void* context, void (*landing)());

// During its lifetime, a fault of a kernel on this OS thread ends the threadgroup with a message. Other
// faults go to the previous handlers.
class FaultGuard {
 public:
  FaultGuard();
  ~FaultGuard();
  FaultGuard(const FaultGuard&) = delete;

 private:
  bool own_stack_ = false;
};

}  // namespace softmetal
