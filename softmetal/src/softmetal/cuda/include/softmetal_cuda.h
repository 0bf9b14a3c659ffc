// The part of Metal's standard library that matrix, tensor and reduction kernels use, for programs that
// softmetal.cuda translated to CUDA C++20.
#pragma once

#include "binding.h"
#include "matrices.h"
#include "packed.h"
#include "tensor_ops.h"
// Needs the names of the others.
#include "../../msl/common/uniform.h"

// A private name of Metal's headers that MLX's kernels use.
SOFTMETAL_INLINE ushort __metal_get_thread_index_in_simdgroup(ushort) {
  return ushort(softmetal::own_metal_lane());
}
