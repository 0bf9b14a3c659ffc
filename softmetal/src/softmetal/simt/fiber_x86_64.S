// void softmetal_fiber_switch(void** save /* rdi */, void* to /* rsi */), System V ABI. The pushes mirror
// SwitchFrame in fiber.h. MXCSR and the x87 control word are not switched: kernels never change them.
  .text
  .globl softmetal_fiber_switch
  .hidden softmetal_fiber_switch
  .type softmetal_fiber_switch, @function
  .p2align 4
softmetal_fiber_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
  .size softmetal_fiber_switch, .-softmetal_fiber_switch
  .section .note.GNU-stack, "", @progbits
