// How the lanes of a simdgroup hold an 8x8 matrix: two neighbouring elements each, (row, 2 * pair) and
// (row, 2 * pair + 1).
//
// Apple does not document this mapping of elements to lanes; MLX, torch and tinygrad have relied on it since
// M1.
#pragma once

#include <metal_simdgroup_matrix>
#include <metal_stdlib>

using namespace metal;

namespace fattn {

struct LanePosition {
  ushort row;   // 0..7
  ushort pair;  // 0..3: columns 2 * pair and 2 * pair + 1
  ushort lane;
};

inline LanePosition lane_position(ushort lane) {
  LanePosition at;
  at.row = ((lane >> 2) & 4) | ((lane >> 1) & 3);
  at.pair = ((lane >> 2) & 2) | (lane & 1);
  at.lane = lane;
  return at;
}

inline ushort lane_of(ushort row, ushort pair) {
  return (pair & 1) | ((row & 3) << 1) | ((pair & 2) << 2) | ((row & 4) << 2);
}

template <typename T>
inline void set_elements(thread simdgroup_matrix<T, 8, 8>& target, T first, T second) {
  target.thread_elements()[0] = first;
  target.thread_elements()[1] = second;
}

}  // namespace fattn
