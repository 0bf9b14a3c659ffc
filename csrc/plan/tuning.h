// Selection as data: tiles and splits per GPU family, dtype and head size. The first row that matches wins;
// the last row of each table is the baseline and matches everything. Every row says where its numbers come
// from.
#pragma once

#include <array>

#include "plan.h"

namespace fattn {

inline constexpr int kAnyFamily = 0;
inline constexpr uint16_t kAnyDim = 0xffff;

struct PrefillRow {
  int min_family;     // Apple GPU family, kAnyFamily: all
  int element_bytes;  // 0: all
  uint16_t max_dim;   // the larger of head_dim and value_dim
  uint16_t row_fragments;
  uint16_t tile_keys;
  uint16_t simdgroups;
  const char* provenance;
};

// 32 query rows over 4 simdgroups. K and V of a step together stay below 20 KB, so that three threadgroups
// fit in the 60 KB of an M1 core: 32 keys, or 16 where elements are wide. From published figures, not
// measured on an Apple GPU.
inline constexpr std::array<PrefillRow, 3> kPrefillTuning{{
    {kAnyFamily, 2, 128, 1, 32, 4, "16-bit, 32 keys per step: 17 KB at D=128 (published M1/M2 figures)"},
    {kAnyFamily, 4, 64, 1, 32, 4, "float32, D <= 64, 32 keys per step: 18 KB (published M1/M2 figures)"},
    {kAnyFamily, 0, kAnyDim, 1, 16, 4, "baseline: 16 keys per step"},
}};

struct DecodeRow {
  int min_family;
  int element_bytes;
  uint16_t max_dim;
  uint16_t tile_keys;
  uint16_t simdgroups;
  int threadgroups_per_core;  // wanted in flight: decides the number of splits
  int min_keys_per_split;
  const char* provenance;
};

// A split is worth its partial result from about 256 keys on. Eight threadgroups of 4 simdgroups per core
// keep 32 KB of loads in flight. From published figures, not measured on an Apple GPU.
inline constexpr std::array<DecodeRow, 2> kDecodeTuning{{
    {kAnyFamily, 4, 128, 16, 4, 8, 256, "float32, 16 keys per step (registers)"},
    {kAnyFamily, 0, kAnyDim, 32, 4, 8, 256, "baseline: 32 keys per step"},
}};

inline constexpr int kMaxSplits = 128;

template <typename Table>
const auto& tuning_row(const Table& table, const DeviceFacts& device, DType dtype, int64_t dim) {
  for (const auto& row : table) {
    const bool matches = device.family >= row.min_family &&
                         (row.element_bytes == 0 || row.element_bytes == size_of(dtype)) &&
                         dim <= row.max_dim;
    if (matches) return row;
  }
  return table.back();
}

}  // namespace fattn
