// The grid of a pass, which may take several dispatches (plan/slices.h). fc_sliced must be declared before:
// by constants.h, or by a kernel that has few function constants.
#pragma once

#include <metal_stdlib>

#include "params.h"

using namespace metal;

namespace fattn {

// Where a threadgroup of this dispatch is in the whole grid, which has one dimension.
inline long group_in_grid(uint group, constant GridSlice& slice) {
  return fc_sliced ? slice.first_group + group : long(group);
}

// Or three.
inline uint3 group_in_grid(uint3 group, constant GridSlice& slice) {
  if (!fc_sliced) {
    return group;
  }
  const long index = group_in_grid(group.x, slice);
  return uint3(index % slice.grid_x, index / slice.grid_x % slice.grid_y,
               index / slice.grid_x / slice.grid_y);
}

}  // namespace fattn
