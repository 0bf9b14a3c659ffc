// Limits the work of a dispatch. macOS kills a command buffer that keeps the GPU busy for some seconds
// ("Caused GPU Timeout Error", "Impacting Interactivity"), and a dispatch cannot be preempted. A longer pass
// runs in slices of its grid, one command buffer each. Slicing does not change the result.
#pragma once

#include <algorithm>
#include <cmath>

#include "plan.h"

namespace fattn {

// Products (of a query element and a key element, or of a weight and a value) per dispatch and core. An M1
// core makes at most 128 multiply-adds per cycle at 1.28 GHz, so it is busy for at least an eighth of a
// second; and for half a second if eight packed rows of decode wait for an eighth of M1's 68 GB/s.
inline constexpr double kMaxProductsPerCore = 2e10;

// An unknown number of cores, as in a virtual machine, counts as the fewest.
inline int64_t cores_of(const DeviceFacts& device) {
  static const int fewest = DeviceFacts().cores;
  return device.cores > 0 ? device.cores : fewest;
}

// Simdgroups of a prefill or a backward whose registers fit on a core.
inline constexpr int64_t kSimdgroupsPerCore = 16;

// Threadgroups that are resident on the GPU.
inline int64_t held_by(const DeviceFacts& device, int64_t simdgroups) {
  return cores_of(device) * std::max<int64_t>(kSimdgroupsPerCore / simdgroups, 1);
}

// Whether the longest tiles of all heads start first, so that the last head does not leave cores idle at the
// end; swaps the grid's tiles and heads. With many waves of threadgroups this does not matter, and tiles of
// one head, which read the same rows or keys, stay together.
inline bool put_heads_first(Pass& pass, const Problem& p, const DeviceFacts& device) {
  constexpr int64_t kManyWaves = 16;
  const int64_t held = held_by(device, pass.spec.simdgroups);
  if (!p.is_causal || p.packed || pass.groups() >= kManyWaves * held) return false;
  std::swap(pass.grid[0], pass.grid[1]);
  return true;
}

inline double max_products(const DeviceFacts& device) {
  return kMaxProductsPerCore * double(cores_of(device));
}

// Every Apple GPU accepts this many threadgroups of a grid in y and z, and of a dispatch in x.
inline constexpr uint32_t kMaxAcross = 65535;
inline constexpr int64_t kMaxAlong = (int64_t{1} << 31) - 1;

// Limits a dispatch to `max_groups` threadgroups of the pass.
inline void cut_into_slices(Pass& pass, int64_t max_groups) {
  pass.spec.sliced = true;
  pass.slice = uint32_t(std::clamp<int64_t>(max_groups, 1, std::min(pass.groups(), kMaxAlong)));
}

// The same, in one dispatch if `max_groups` allows. Slices run along x, so a grid that is too large in y or
// z is sliced as well.
inline void limit_groups(Pass& pass, double max_groups) {
  const bool fits = std::max(pass.grid[1], pass.grid[2]) <= kMaxAcross;
  if (!fits || max_groups < double(pass.groups())) {
    cut_into_slices(pass, int64_t(std::min(max_groups, double(kMaxAlong))));
  }
}

// The same by products, but never below a threadgroup per core. A slice is whole waves of threadgroups, or if
// it is less than one, as many on each core: the next slice waits for its last threadgroup.
inline void limit_products(Pass& pass, const DeviceFacts& device, double products_of_group) {
  const auto cores = double(cores_of(device)), held = double(held_by(device, pass.spec.simdgroups));
  const double most = std::max(max_products(device) / products_of_group, cores);
  const double wave = most < held ? cores : held;
  limit_groups(pass, most < double(pass.groups()) ? std::floor(most / wave) * wave : most);
}

}  // namespace fattn
