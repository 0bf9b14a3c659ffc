// Tables of tiles and chunks by GPU family, dtype and head size. The first row that matches wins; the last
// row of each table is the baseline and matches everything. Every row names the source of its numbers.
// registers.h estimates the registers of a row.
#pragma once

#include <array>

#include "plan.h"

namespace fattn {

inline constexpr int kAnyFamily = 0;
inline constexpr uint16_t kAnyDim = 0xffff;

// A dtype as a bit of the sets below.
constexpr uint8_t set_of(DType dtype) { return uint8_t(1u << unsigned(dtype)); }
inline constexpr uint8_t kFloat32s = set_of(DType::kFloat32);
inline constexpr uint8_t kFloat16s = set_of(DType::kFloat16);
inline constexpr uint8_t kBFloat16s = set_of(DType::kBFloat16);
inline constexpr uint8_t k16Bit = kFloat16s | kBFloat16s;
inline constexpr uint8_t kAnyDType = 0xff;

struct PrefillRow {
  int min_family;  // Apple GPU family, kAnyFamily: all
  uint8_t dtypes;
  uint16_t max_dim;        // the larger of head_dim and value_dim
  uint16_t row_fragments;  // of a row group
  uint16_t row_groups;     // per threadgroup; its simdgroups divide the columns. 0: each is a row group
  uint16_t tile_keys;
  uint16_t simdgroups;
  bool early_loads;  // prefill_wide: of V only
  const char* provenance;
};

// K and V of a step together stay below 20 KB, so that three threadgroups fit in the 60 KB of an M1 core. M1
// and M2 have 256 half registers per lane, and the largest part of a step without options needs at most 235
// by Mesa's count (bench/results/agx.json). There K and V are loaded late and multiplied piece by piece, and
// four simdgroups share a tile, so that three threadgroups fit on a core. Newer GPUs allocate registers
// dynamically; their rows are the fastest on an NVIDIA H200. Nothing here was measured on an Apple GPU.
inline constexpr std::array<PrefillRow, 10> kPrefillTuning{{
    {9, k16Bit, 64, 2, 0, 32, 4, true,
     "16-bit, D <= 64: 16 rows per simdgroup, 32 keys per step, loads far ahead (H200)"},
    {9, k16Bit, kAnyDim, 2, 0, 32, 8, true,
     "16-bit: 16 rows per simdgroup, 8 simdgroups share 32 keys per step, loads far ahead (H200)"},
    {9, kFloat32s, 64, 1, 0, 32, 4, true, "float32, D <= 64: 32 keys per step, loads far ahead (H200)"},
    {9, kAnyDType, kAnyDim, 1, 0, 16, 4, true, "16 keys per step, loads far ahead (H200)"},
    {kAnyFamily, kFloat16s, 80, 2, 0, 32, 4, false,
     "float16, D <= 80: 16 rows per simdgroup, 32 keys per step (registers of M1/M2 as Mesa counts)"},
    {kAnyFamily, kFloat16s, 128, 1, 0, 32, 4, false,
     "float16, D <= 128: 32 keys per step (registers of M1/M2 as Mesa counts)"},
    {kAnyFamily, kAnyDType, 64, 1, 0, 32, 4, false,
     "D <= 64: 32 keys per step (registers of M1/M2 as Mesa counts)"},
    {kAnyFamily, kBFloat16s, 80, 2, 0, 16, 4, false,
     "bfloat16, D <= 80: 16 rows per simdgroup, 16 keys per step (registers of M1/M2 as Mesa counts)"},
    {kAnyFamily, kBFloat16s, 96, 1, 0, 32, 4, false,
     "bfloat16, D <= 96: 32 keys per step (registers of M1/M2 as Mesa counts)"},
    {kAnyFamily, kAnyDType, kAnyDim, 1, 0, 16, 4, false,
     "baseline: 16 keys per step (registers of M1/M2 as Mesa counts)"},
}};

// Heads above kMaxRowDim use prefill_wide.metal, whose simdgroups divide the columns. In 16 bits the output
// of a simdgroup, 16 rows, takes 64 half registers per lane: a step without hidden keys then needs at most
// 229 of the 256 of M1 and M2 by Mesa's count, without spills. Early loads of values need 34 more. The query
// in threadgroup memory leaves room for fewer rows in float32. Sizes that fit were chosen by timing on an
// NVIDIA H200 (bench/NOTES.md); nothing was measured on an Apple GPU.
inline constexpr std::array<PrefillRow, 5> kPrefillWideTuning{{
    {kAnyFamily, k16Bit, 256, 2, 1, 32, 4, false,
     "16-bit, D <= 256: 16 rows, columns over 4 simdgroups (registers of M1/M2 as Mesa counts; H200)"},
    {9, k16Bit, kAnyDim, 2, 1, 32, 8, true,
     "16-bit: 16 rows, columns over 8 simdgroups, values loaded early (H200)"},
    {kAnyFamily, k16Bit, kAnyDim, 2, 1, 32, 8, false,
     "16-bit: 16 rows, columns over 8 simdgroups (registers of M1/M2 as Mesa counts)"},
    {kAnyFamily, kAnyDType, 256, 1, 2, 32, 8, false,
     "D <= 256: 16 rows, columns of each 8 over 4 simdgroups (registers of M1/M2 as Mesa counts)"},
    {kAnyFamily, kAnyDType, kAnyDim, 1, 1, 32, 8, false,
     "baseline: 8 rows, columns over 8 simdgroups (registers of M1/M2 as Mesa counts)"},
}};

struct PrefillTensorRow {
  uint16_t max_dim;
  bool registers;
  uint16_t row_groups;  // of 16 rows; the simdgroups of a group divide the columns of the values
  uint16_t tile_keys;
  uint16_t simdgroups;
  const char* provenance;
};

// Query, a staged step and, without registers, the scores of all rows take at most 31 KiB of threadgroup
// memory. Output and scores of a simdgroup take 80 floats per lane at most, as in kernels that run on M5
// (published, xwen); in prefill_latent_tensor, for keys of 576 columns, they take 72. Rows, keys and
// simdgroups are as in MLX's and xwen's kernels for heads of 128. Nothing here was measured on an Apple GPU.
inline constexpr std::array<PrefillTensorRow, 6> kPrefillTensorTuning{{
    {128, true, 4, 32, 4,
     "tensors: 4 simdgroups of 16 rows, 32 keys per step (published, MLX and xwen on M5)"},
    {96, false, 4, 32, 4, "tensors through threadgroup memory: 4 simdgroups of 16 rows, 32 keys per step"},
    {128, false, 2, 32, 2, "tensors through threadgroup memory: 2 simdgroups of 16 rows, 32 keys per step"},
    {256, true, 2, 16, 4, "tensors: 16 keys per step, columns over 2 of 4 simdgroups"},
    {256, false, 2, 16, 4,
     "tensors through threadgroup memory: 16 keys per step, columns over 2 of 4 simdgroups"},
    {576, false, 1, 32, 4,
     "tensors through threadgroup memory: 16 rows, 32 keys per step, columns over 4 simdgroups"},
}};

struct BackwardTensorRow {
  uint16_t max_dim;
  bool registers;
  uint16_t row_groups;  // of 16 query rows
  uint16_t key_groups;  // of 16 keys
  uint16_t walked;      // keys or rows per step
  uint16_t shares;      // simdgroups that divide the columns of a gradient
  const char* provenance;
};

// Both operands of the own rows, a staged step and, without registers, the gradients of a step take at most
// 31 KB of threadgroup memory. A gradient and two blocks of scores take 96 floats per lane at most. Products
// have the sizes of prefill's products. Nothing here was measured on an Apple GPU.
inline constexpr std::array<BackwardTensorRow, 6> kBackwardTensorTuning{{
    {64, true, 4, 4, 32, 1, "tensors, D <= 64: 64 rows or keys per threadgroup"},
    {128, true, 2, 2, 32, 1, "tensors, D <= 128: 32 rows or keys per threadgroup"},
    {96, false, 2, 2, 32, 1, "tensors through threadgroup memory, D <= 96: 32 rows or keys per threadgroup"},
    {128, false, 2, 1, 32, 1,
     "tensors through threadgroup memory, D <= 128: 32 rows or 16 keys per threadgroup"},
    {256, true, 1, 1, 16, 2, "tensors: 16 rows or keys per threadgroup, columns over 2 simdgroups"},
    {256, false, 1, 1, 16, 2,
     "tensors through threadgroup memory: 16 rows or keys per threadgroup, columns over 2 simdgroups"},
}};

// The row of a tensor table for a head size.
template <typename Table>
constexpr const auto& tensor_row(const Table& table, int64_t dim, bool registers) {
  const auto* found = table.begin();
  while (dim > found->max_dim || found->registers != registers) ++found;
  return *found;
}

struct BackwardRow {
  int min_family;
  uint8_t dtypes;  // of the products' operands
  uint16_t max_dim;
  uint16_t owned;       // fragments of eight rows or keys, of a group of simdgroups that divide the columns
  uint16_t groups;      // per threadgroup
  uint16_t walked;      // keys or rows per step
  uint16_t simdgroups;  // of all groups
  const char* provenance;
};

// A simdgroup of backward_query holds the operands and the gradient of its rows, one of backward_key two
// operands and two gradients of its keys. For M1 and M2 these are the sizes with the fewest simulated cycles
// per product among those whose steps need at most 234 of a lane's 256 half registers by Mesa's count,
// without spills, and in 16 bits leave room for 384 threads on a core (bench/results/agx.json). There
// bfloat16 is multiplied as float32. Sizes for later chips were chosen by time on an NVIDIA H100. Nothing
// here was measured on an Apple GPU.
inline constexpr std::array<BackwardRow, 7> kBackwardQueryTuning{{
    {9, k16Bit, 96, 2, 4, 32, 4,
     "16-bit, D <= 96, M3 and later: 16 rows per simdgroup, 32 keys per step (H100)"},
    {9, k16Bit, 128, 2, 2, 16, 4,
     "16-bit, D <= 128, M3 and later: 16 rows and 16 keys, columns over 2 of 4 simdgroups (H100)"},
    {kAnyFamily, k16Bit, 128, 1, 4, 32, 4,
     "16-bit, D <= 128: 8 rows per simdgroup, 32 keys per step (registers of M1/M2 as Mesa counts)"},
    {kAnyFamily, k16Bit, kAnyDim, 1, 2, 16, 8,
     "16-bit: 16 keys per step, columns over 4 simdgroups (registers of M1/M2 as Mesa counts)"},
    {kAnyFamily, kFloat32s, 80, 1, 4, 16, 4,
     "float32, D <= 80: 8 rows per simdgroup, 16 keys per step (registers of M1/M2 as Mesa counts)"},
    {kAnyFamily, kFloat32s, 128, 1, 2, 16, 4,
     "float32, D <= 128: 16 keys per step, columns over 2 simdgroups (registers of M1/M2 as Mesa counts)"},
    {kAnyFamily, kAnyDType, kAnyDim, 1, 2, 8, 8,
     "baseline: 8 keys per step, columns over 4 simdgroups (registers of M1/M2 as Mesa counts)"},
}};
inline constexpr std::array<BackwardRow, 12> kBackwardKeyTuning{{
    {9, k16Bit, 64, 2, 4, 32, 4, "16-bit, D <= 64, M3 and later: 16 keys per simdgroup, 32 rows per step"},
    {9, k16Bit, 96, 1, 4, 32, 4,
     "16-bit, D <= 96, M3 and later: 8 keys per simdgroup, 32 rows per step (H100)"},
    {9, k16Bit, 128, 2, 4, 16, 8,
     "16-bit, D <= 128, M3 and later: 16 keys and 16 rows, columns over 2 of 8 simdgroups (H100)"},
    {kAnyFamily, k16Bit, 80, 1, 4, 32, 4,
     "16-bit, D <= 80: 8 keys per simdgroup, 32 rows per step (registers of M1/M2 as Mesa counts)"},
    {kAnyFamily, k16Bit, 96, 1, 4, 16, 8,
     "16-bit, D <= 96: 16 rows, columns over 2 of 8 simdgroups (registers of M1/M2 as Mesa counts)"},
    {kAnyFamily, k16Bit, 128, 1, 2, 16, 4,
     "16-bit, D <= 128: 16 rows, columns over 2 of 4 simdgroups (registers of M1/M2 as Mesa counts)"},
    {kAnyFamily, k16Bit, kAnyDim, 1, 2, 16, 8,
     "16-bit: 16 rows per step, columns over 4 simdgroups (registers of M1/M2 as Mesa counts)"},
    {kAnyFamily, kFloat32s, 32, 1, 4, 32, 4,
     "float32, D <= 32: 8 keys per simdgroup, 32 rows per step (registers of M1/M2 as Mesa counts)"},
    {kAnyFamily, kFloat32s, 80, 1, 4, 16, 8,
     "float32, D <= 80: 16 rows, columns over 2 of 8 simdgroups (registers of M1/M2 as Mesa counts)"},
    {kAnyFamily, kFloat32s, 96, 1, 2, 16, 4,
     "float32, D <= 96: 16 rows, columns over 2 of 4 simdgroups (registers of M1/M2 as Mesa counts)"},
    {kAnyFamily, kFloat32s, 128, 1, 2, 16, 8,
     "float32, D <= 128: 16 rows per step, columns over 4 simdgroups (registers of M1/M2 as Mesa counts)"},
    {kAnyFamily, kAnyDType, kAnyDim, 1, 2, 8, 16,
     "baseline: 8 rows per step, columns over 8 simdgroups (registers of M1/M2 as Mesa counts)"},
}};

struct DecodeRow {
  int min_family;
  uint8_t dtypes;
  uint16_t max_dim;
  uint16_t tile_keys;
  uint16_t simdgroups;
  uint16_t min_chunk;  // keys, for up to eight packed rows; at least a step of every simdgroup
  uint16_t threadgroups_per_core;
  const char* provenance;
};

// The keys of a step leave registers for four threadgroups on a core of M1 and M2, for all options and
// numbers of packed rows: the largest part of a step needs at most 208 of a lane's 256 halves by the count of
// Mesa's compiler for these GPUs, without spills. D = 128 needs 171 in float16, 170 in bfloat16 and 163 in
// float32 without options, and 199, 205 and 187 with all compatible ones (bench/results/agx.json). These
// numbers of keys are also the fastest on an H200. Nothing here was measured on an Apple GPU.
inline constexpr std::array<DecodeRow, 3> kDecodeTuning{{
    {kAnyFamily, k16Bit, 96, 32, 4, 64, 3,
     "16-bit, D <= 96: 32 keys per step (registers of M1/M2 as Mesa counts; H200)"},
    {kAnyFamily, kFloat32s, kAnyDim, 8, 4, 64, 3,
     "float32: 8 keys per step (registers of M1/M2 as Mesa counts)"},
    {kAnyFamily, kAnyDType, kAnyDim, 16, 4, 64, 3,
     "16-bit: 16 keys per step (registers of M1/M2 as Mesa counts; H200)"},
}};

// Keys per step over a quantised cache, by the same count: scales and decoding take registers too. A
// DecodeRow has the other sizes.
struct QuantisedRow {
  int min_family;
  uint8_t dtypes;   // of query
  uint8_t formats;  // as bits 1 << KvFormat
  uint16_t max_dim;
  uint16_t tile_keys;
  const char* provenance;
};

inline constexpr std::array<QuantisedRow, 4> kQuantisedTuning{{
    {9, kFloat16s, 1 << kKvInt8 | 1 << kKvFp8E4M3, kAnyDim, 16,
     "float16 over int8 or fp8: 16 keys per step, more than M1 and M2 have registers for (H200)"},
    {kAnyFamily, kAnyDType, 0xff, 64, 16,
     "quantised cache, D <= 64: 16 keys per step (registers of M1/M2 as Mesa counts)"},
    {kAnyFamily, kAnyDType, 1 << kKvInt4, 96, 16,
     "int4 cache, D <= 96: 16 keys per step (registers of M1/M2 as Mesa counts)"},
    {kAnyFamily, kAnyDType, 0xff, kAnyDim, 8,
     "quantised cache: 8 keys per step (registers of M1/M2 as Mesa counts)"},
}};

inline const QuantisedRow& quantised_row(const DeviceFacts& device, DType dtype, KvFormat format,
                                         int64_t dim) {
  for (const auto& row : kQuantisedTuning) {
    const bool matches = device.family >= row.min_family && (row.dtypes & set_of(dtype)) != 0 &&
                         (row.formats & (1 << format)) != 0 && dim <= row.max_dim;
    if (matches) return row;
  }
  return kQuantisedTuning.back();
}

// Heads above this use decode_wide.metal, whose simdgroups divide the columns. `tile_keys` and `simdgroups`
// are for up to eight packed rows; more rows take fewer keys and more simdgroups. By the same count, float16
// needs at most 213 halves for up to 16 rows. Widened to float32, 16 rows of 512 columns need 240 and spill
// (bench/NOTES.md). A quantised cache needs as many as a cache in the operands' dtype, and twelve more for
// the scales of its rows.
inline constexpr int64_t kMaxRowDim = 128;
inline constexpr std::array<DecodeRow, 5> kDecodeWideTuning{{
    {kAnyFamily, k16Bit, 192, 32, 4, 128, 4,
     "16-bit products, D <= 192: 32 keys per step, columns over 4 simdgroups"},
    {kAnyFamily, k16Bit, 256, 32, 8, 128, 2,
     "16-bit products, D <= 256: 32 keys per step, columns over 8 simdgroups"},
    {kAnyFamily, k16Bit, kAnyDim, 16, 8, 128, 2,
     "16-bit products: 16 keys per step, columns over 8 simdgroups"},
    {kAnyFamily, kAnyDType, 256, 16, 8, 128, 2, "D <= 256: 16 keys per step, columns over 8 simdgroups"},
    {kAnyFamily, kAnyDType, kAnyDim, 16, 16, 128, 1,
     "baseline: 16 keys per step, columns over 16 simdgroups"},
}};
inline constexpr int64_t kMaxRowGroups = 4;        // of eight rows, per threadgroup
inline constexpr int64_t kMaxGroupColumns = 64;    // output columns per simdgroup, times its row groups
inline constexpr int64_t kMaxWideSimdgroups = 16;  // upper bound for the above

// Up to this many packed rows, of heads up to this size, use decode_vector.metal. `tile_keys` counts the
// scores of a step: two rows have half as many keys. The largest part of a step without options needs at most
// 203 of the 256 halves, counted as above, and 249 for two rows of 256 columns, whatever the format of the
// cache. float32 reads twice the bytes in a step, and ends fewer chunks.
inline constexpr int64_t kMaxVectorRows = 2;
inline constexpr int64_t kMaxVectorDim = 256;
inline constexpr std::array<DecodeRow, 2> kDecodeVectorTuning{{
    {kAnyFamily, k16Bit, kAnyDim, 32, 4, 64, 4,
     "one or two rows, 16-bit: a lane per score, 32 in a step (registers of M1/M2 as Mesa counts; H200)"},
    {kAnyFamily, kAnyDType, kAnyDim, 32, 4, 128, 4,
     "one or two rows: a lane per score, 32 in a step (registers of M1/M2 as Mesa counts)"},
}};

template <typename Table>
const auto& tuning_row(const Table& table, const DeviceFacts& device, DType dtype, int64_t dim) {
  for (const auto& row : table) {
    const bool matches =
        device.family >= row.min_family && (row.dtypes & set_of(dtype)) != 0 && dim <= row.max_dim;
    if (matches) return row;
  }
  return table.back();
}

}  // namespace fattn
