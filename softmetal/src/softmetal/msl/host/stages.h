// <metal_graphics>, <metal_interpolate>, <metal_mesh>: names only. The translator removes vertex, fragment,
// mesh and object functions; the functions that they call stay, but no kernel calls them.
#pragma once
#pragma clang system_header
#include "vectors.h"

namespace metal {
#define SOFTMETAL_DERIVATIVE(NAME) \
  template <class T>               \
  SOFTMETAL_INLINE T NAME(T) {     \
    __builtin_trap();              \
  }
SOFTMETAL_DERIVATIVE(dfdx)
SOFTMETAL_DERIVATIVE(dfdy)
SOFTMETAL_DERIVATIVE(fwidth)
#undef SOFTMETAL_DERIVATIVE
[[noreturn]] SOFTMETAL_INLINE void discard_fragment() { __builtin_trap(); }
SOFTMETAL_INLINE bool simd_is_helper_thread() { return false; }
SOFTMETAL_INLINE bool quad_is_helper_thread() { return false; }

namespace interpolation {
struct perspective {};
struct no_perspective {};
}  // namespace interpolation
#define SOFTMETAL_STAGE_METHOD(RESULT, NAME) \
  template <class... A>                      \
  SOFTMETAL_INLINE RESULT NAME(A...) const { \
    __builtin_trap();                        \
  }
template <class T, class Mode>
struct interpolant {
  SOFTMETAL_STAGE_METHOD(T, interpolate_at_center)
  SOFTMETAL_STAGE_METHOD(T, interpolate_at_centroid)
  SOFTMETAL_STAGE_METHOD(T, interpolate_at_offset)
  SOFTMETAL_STAGE_METHOD(T, interpolate_at_sample)
};

enum class topology { point, line, triangle };
template <class Vertex, class Primitive, uint vertices, uint primitives, topology shape>
struct mesh {
  SOFTMETAL_STAGE_METHOD(void, set_vertex)
  SOFTMETAL_STAGE_METHOD(void, set_primitive)
  SOFTMETAL_STAGE_METHOD(void, set_index)
  SOFTMETAL_STAGE_METHOD(void, set_indices)
  SOFTMETAL_STAGE_METHOD(void, set_primitive_count)
};
struct mesh_grid_properties {
  SOFTMETAL_STAGE_METHOD(void, set_threadgroups_per_grid)
};
#undef SOFTMETAL_STAGE_METHOD
}  // namespace metal
