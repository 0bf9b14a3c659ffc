// Replaces msl/host/softmetal_msl.h when a translated program is compiled for Apple's GPUs: the same types
// and math, with the GPU's own simdgroup operations, barriers and arguments.
//
// Address spaces are 1 (device), 2 (constant) and 3 (threadgroup), as llvm-spirv numbers them. A call of
// nir_x() is instruction x of Mesa's intermediate language, a call of __spirv_X() instruction X of SPIR-V.
#pragma once
#pragma clang system_header
#define opencl_constant address_space(2)
#define opencl_local address_space(3)
#define opencl_global_device address_space(1)
#define opencl_global_host address_space(2)
#define SOFTMETAL_WORST_MATH 0
#define SOFTMETAL_HARDWARE_MATH 1

#include "types.h"
#include "traits.h"
#include "vectors.h"
#include "braces.h"
#include "casts.h"
#include "integer.h"

extern "C" {
float nir_fexp2(float) __attribute__((const));
float nir_flog2(float) __attribute__((const));
}
#define __builtin_exp2f(x) nir_fexp2(x)
#define __builtin_expf(x) nir_fexp2((x) * 1.44269504088896340736f)
#define __builtin_log2f(x) nir_flog2(x)
#define __builtin_logf(x) (nir_flog2(x) * 0.69314718055994530942f)
#define __builtin_tanhf(x) (1.0f - 2.0f / (nir_fexp2((x) * 2.88539008177792681472f) + 1.0f))
#define softmetal_count_exp() ((void)0)
#include "math.h"
#include "relational.h"
#include "scalar_first.h"
#include "geometric.h"
#include "matrix.h"
#include "pack.h"

#include "agx_arguments.h"
#include "agx_simdgroup.h"
#include "agx_simdgroup_matrix.h"
