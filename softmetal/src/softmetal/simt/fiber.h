// A fiber: a stack and a saved stack pointer. One fiber runs one Metal thread; it never moves to another OS
// thread, because compilers cache the addresses of thread-local variables.
#pragma once

#include <stddef.h>
#include <stdint.h>

// Saves the callee-saved registers on the current stack, stores the stack pointer in *save and continues the
// fiber suspended at `to`.
extern "C" void softmetal_fiber_switch(void** save, void* to);

namespace softmetal {

// The frame of softmetal_fiber_switch on the stack of a suspended fiber, from the stack pointer upwards.
struct SwitchFrame {
#if defined(__x86_64__)
  void *r15, *r14, *r13, *r12, *rbx;
  void* frame_pointer;
  void* return_address;
#elif defined(__aarch64__)
  double d8_to_d15[8];
  void* x19_to_x28[10];
  void* frame_pointer;
  void* return_address;
#else
#error "softmetal needs x86-64 or aarch64"
#endif
};

// Creates a suspended fiber that will call `entry` (which must not return) on the stack that ends at `top`.
inline void* prepare_fiber(char* top, void (*entry)()) {
  uintptr_t end = reinterpret_cast<uintptr_t>(top) & ~uintptr_t{15};
  end -= 16;  // a null return address for `entry`: ends backtraces, and gives x86-64 the alignment that a
              // call leaves
  *reinterpret_cast<uint64_t*>(end) = 0;
#if defined(__x86_64__)
  *reinterpret_cast<uint64_t*>(end + 8) = 0;
  end += 8;
#endif
  auto* frame = reinterpret_cast<SwitchFrame*>(end - sizeof(SwitchFrame));
  frame->frame_pointer = nullptr;
  frame->return_address = reinterpret_cast<void*>(entry);
  return frame;
}

}  // namespace softmetal
