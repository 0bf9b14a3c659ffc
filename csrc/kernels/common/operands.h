// The signature that the attention kernels share.
#pragma once

#include "keys.h"

// A pipeline has only the operands that its function constants enable. Reading another one is undefined.
#define FATTN_ATTENTION_OPERANDS(ALWAYS, OPTIONAL) FATTN_OPERANDS(ALWAYS, OPTIONAL, OPTIONAL, FATTN_NOTHING)

#define FATTN_ARGUMENT(slot, type, name) type name [[buffer(fattn::kSlot##slot)]],
#define FATTN_OPTIONAL_ARGUMENT(slot, type, name, condition) \
  type name [[buffer(fattn::kSlot##slot), function_constant(condition)]],

// All operands except the results.
#define FATTN_INPUTS(ALWAYS, OPTIONAL) FATTN_OPERANDS(ALWAYS, OPTIONAL, FATTN_NOTHING, FATTN_NOTHING)

// The signature of a kernel with parameters of type `Params`.
#define FATTN_ATTENTION_ARGUMENTS(Params)                           \
  FATTN_ATTENTION_OPERANDS(FATTN_ARGUMENT, FATTN_OPTIONAL_ARGUMENT) \
  FATTN_GRID_ARGUMENTS(Params)
// The arguments after the operands.
#define FATTN_GRID_ARGUMENTS(Params)                                                         \
  constant Params &params [[buffer(fattn::kSlotParams)]],                                    \
      constant GridSlice &slice [[buffer(fattn::kSlotSlice), function_constant(fc_sliced)]], \
      uint3 group_in_dispatch [[threadgroup_position_in_grid]],                              \
      ushort simdgroup_index [[simdgroup_index_in_threadgroup]], ushort lane [[thread_index_in_simdgroup]]

namespace fattn {

// The index of a thread in its threadgroup. As a kernel argument it would take one more register.
inline ushort thread_in_group(ushort simdgroup_index, ushort lane) {
  return simdgroup_index * kSimdWidth + lane;
}

// The operands as a struct.
#define FATTN_MEMBER(slot, type, name) type name;
#define FATTN_OPTIONAL_MEMBER(slot, type, name, condition) type name;
struct Operands {
  FATTN_ATTENTION_OPERANDS(FATTN_MEMBER, FATTN_OPTIONAL_MEMBER)
};
#undef FATTN_MEMBER
#undef FATTN_OPTIONAL_MEMBER

// In a kernel: fills an Operands struct from the arguments.
#define FATTN_TAKE(slot, type, name) taken.name = name;
#define FATTN_TAKE_OPTIONAL(slot, type, name, condition) \
  if (condition) {                                       \
    taken.name = name;                                   \
  }
#define FATTN_TAKE_ARGUMENTS(operands)                        \
  {                                                           \
    thread Operands& taken = operands;                        \
    FATTN_ATTENTION_OPERANDS(FATTN_TAKE, FATTN_TAKE_OPTIONAL) \
  }

}  // namespace fattn
