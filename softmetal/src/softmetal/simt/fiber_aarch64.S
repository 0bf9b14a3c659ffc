// void softmetal_fiber_switch(void** save /* x0 */, void* to /* x1 */), AAPCS64. The layout mirrors SwitchFrame in
// fiber.h: d8-d15 (only their low halves are callee-saved), x19-x28, the frame pointer, the link register.
  .text
  .globl softmetal_fiber_switch
  .hidden softmetal_fiber_switch
  .type softmetal_fiber_switch, %function
  .p2align 4
softmetal_fiber_switch:
  stp d8, d9, [sp, #-160]!
  stp d10, d11, [sp, #16]
  stp d12, d13, [sp, #32]
  stp d14, d15, [sp, #48]
  stp x19, x20, [sp, #64]
  stp x21, x22, [sp, #80]
  stp x23, x24, [sp, #96]
  stp x25, x26, [sp, #112]
  stp x27, x28, [sp, #128]
  stp x29, x30, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x29, x30, [sp, #144]
  ldp x27, x28, [sp, #128]
  ldp x25, x26, [sp, #112]
  ldp x23, x24, [sp, #96]
  ldp x21, x22, [sp, #80]
  ldp x19, x20, [sp, #64]
  ldp d14, d15, [sp, #48]
  ldp d12, d13, [sp, #32]
  ldp d10, d11, [sp, #16]
  ldp d8, d9, [sp], #160
  ret
  .size softmetal_fiber_switch, .-softmetal_fiber_switch
  .section .note.GNU-stack, "", %progbits
