// The position of a threadgroup in the grid of a pass, which may be split over several dispatches
// (plan/slices.h). Declare fc_sliced before including this file; constants.h declares it.
#pragma once

#include <metal_stdlib>

#include "params.h"

using namespace metal;

namespace fattn {

// The index of a threadgroup in a one-dimensional grid.
inline long group_in_grid(uint group, constant GridSlice& slice) {
  return fc_sliced ? slice.first_group + group : long(group);
}

// Its position in a three-dimensional grid.
inline uint3 group_in_grid(uint3 group, constant GridSlice& slice) {
  if (!fc_sliced) {
    return group;
  }
  const long index = group_in_grid(group.x, slice);
  return uint3(index % slice.grid_x, index / slice.grid_x % slice.grid_y,
               index / slice.grid_x / slice.grid_y);
}

}  // namespace fattn
