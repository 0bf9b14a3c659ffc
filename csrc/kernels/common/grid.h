// The grid of a pass, which may take several dispatches (plan/slices.h).
#pragma once

#include "constants.h"

namespace fattn {

// Where a threadgroup of this dispatch is in the whole grid.
inline uint3 group_in_grid(uint3 group, constant GridSlice& slice) {
  if (!fc_sliced) {
    return group;
  }
  const long index = slice.first_group + group.x;
  return uint3(index % slice.grid_x, index / slice.grid_x % slice.grid_y,
               index / slice.grid_x / slice.grid_y);
}

}  // namespace fattn
