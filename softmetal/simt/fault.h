// Hardware faults inside kernels (null or wild pointers, overrun of a thread's stack, integer division by
// zero) as errors of the dispatch.
#pragma once

namespace softmetal {

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
