// Tables of tiles and chunks by GPU family, dtype and head size. The first row that matches wins; the last
// row of each table is the baseline and matches everything. registers.h estimates the registers of a row.
#pragma once

#include <array>

#include "plan.h"

namespace fattn {

// Where the sizes of a row come from.
inline constexpr const char* kMesa = "registers of M1/M2 as Mesa counts";
inline constexpr const char* kMesaAndH200 = "registers of M1/M2 as Mesa counts; H200";
inline constexpr const char* kH200 = "H200";
inline constexpr const char* kH100 = "H100";
inline constexpr const char* kPublished = "published, MLX and xwen on M5";
inline constexpr const char* kCounted = "registers and threadgroup memory by hand";

template <typename Sizes>
struct TuningRow {
  Scope scope;
  Sizes sizes;
};

struct PrefillSizes {
  uint16_t row_fragments;   // of a row group
  uint16_t row_groups = 0;  // per threadgroup; its simdgroups divide the columns. 0: each is a row group
  uint16_t tile_keys;
  uint16_t simdgroups;
  bool early_loads = false;  // prefill_wide: of V only
};
using PrefillRow = TuningRow<PrefillSizes>;

// K and V of a step together stay below 20 KB, so that three threadgroups fit in the 60 KB of an M1 core. M1
// and M2 have 256 half registers per lane, and the largest part of a step without options needs at most 235
// by Mesa's count (bench/results/agx.json). There K and V are loaded late and multiplied piece by piece, and
// four simdgroups share a tile, so that three threadgroups fit on a core. Newer GPUs allocate registers
// dynamically; their rows are the fastest on an NVIDIA H200. Nothing here was measured on an Apple GPU.
inline constexpr std::array<PrefillRow, 10> kPrefillTuning{{
    {{.min_family = 9, .dtypes = k16Bit, .max_dim = 64, .source = kH200},
     {.row_fragments = 2, .tile_keys = 32, .simdgroups = 4, .early_loads = true}},
    {{.min_family = 9, .dtypes = k16Bit, .source = kH200},
     {.row_fragments = 2, .tile_keys = 32, .simdgroups = 8, .early_loads = true}},
    {{.min_family = 9, .dtypes = kFloat32s, .max_dim = 64, .source = kH200},
     {.row_fragments = 1, .tile_keys = 32, .simdgroups = 4, .early_loads = true}},
    {{.min_family = 9, .source = kH200},
     {.row_fragments = 1, .tile_keys = 16, .simdgroups = 4, .early_loads = true}},
    {{.dtypes = kFloat16s, .max_dim = 80, .source = kMesa},
     {.row_fragments = 2, .tile_keys = 32, .simdgroups = 4}},
    {{.dtypes = kFloat16s, .max_dim = 128, .source = kMesa},
     {.row_fragments = 1, .tile_keys = 32, .simdgroups = 4}},
    {{.max_dim = 64, .source = kMesa}, {.row_fragments = 1, .tile_keys = 32, .simdgroups = 4}},
    {{.dtypes = kBFloat16s, .max_dim = 80, .source = kMesa},
     {.row_fragments = 2, .tile_keys = 16, .simdgroups = 4}},
    {{.dtypes = kBFloat16s, .max_dim = 96, .source = kMesa},
     {.row_fragments = 1, .tile_keys = 32, .simdgroups = 4}},
    {{.source = kMesa}, {.row_fragments = 1, .tile_keys = 16, .simdgroups = 4}},
}};

// Heads above kMaxRowDim use prefill_wide.metal, whose simdgroups divide the columns. In 16 bits the output
// of a simdgroup, 16 rows, takes 64 half registers per lane: a step without hidden keys then needs at most
// 229 of the 256 of M1 and M2 by Mesa's count, without spills. Early loads of values need 34 more. The query
// in threadgroup memory leaves room for fewer rows in float32. Sizes that fit were chosen by timing on an
// NVIDIA H200 (bench/NOTES.md); nothing was measured on an Apple GPU.
inline constexpr std::array<PrefillRow, 5> kPrefillWideTuning{{
    {{.dtypes = k16Bit, .max_dim = 256, .source = kMesaAndH200},
     {.row_fragments = 2, .row_groups = 1, .tile_keys = 32, .simdgroups = 4}},
    {{.min_family = 9, .dtypes = k16Bit, .source = kH200},
     {.row_fragments = 2, .row_groups = 1, .tile_keys = 32, .simdgroups = 8, .early_loads = true}},
    {{.dtypes = k16Bit, .source = kMesa},
     {.row_fragments = 2, .row_groups = 1, .tile_keys = 32, .simdgroups = 8}},
    {{.max_dim = 256, .source = kMesa},
     {.row_fragments = 1, .row_groups = 2, .tile_keys = 32, .simdgroups = 8}},
    {{.source = kMesa}, {.row_fragments = 1, .row_groups = 1, .tile_keys = 32, .simdgroups = 8}},
}};

struct PrefillTensorSizes {
  uint16_t row_groups;  // of 16 rows; the simdgroups of a group divide the columns of the values
  uint16_t tile_keys;
  uint16_t simdgroups;
};
using PrefillTensorRow = TuningRow<PrefillTensorSizes>;

// Query, a staged step and, without registers, the scores of all rows take at most 31 KiB of threadgroup
// memory. Output and scores of a simdgroup take 80 floats per lane at most, as in kernels that run on M5
// (published, xwen); in prefill_latent_tensor, for keys of 576 columns, they take 72. Rows, keys and
// simdgroups are as in MLX's and xwen's kernels for heads of 128. Nothing here was measured on an Apple GPU.
inline constexpr std::array<PrefillTensorRow, 6> kPrefillTensorTuning{{
    {{.max_dim = 128, .registers = true, .source = kPublished},
     {.row_groups = 4, .tile_keys = 32, .simdgroups = 4}},
    {{.max_dim = 96, .source = kCounted}, {.row_groups = 4, .tile_keys = 32, .simdgroups = 4}},
    {{.max_dim = 128, .source = kCounted}, {.row_groups = 2, .tile_keys = 32, .simdgroups = 2}},
    {{.max_dim = 256, .registers = true, .source = kCounted},
     {.row_groups = 2, .tile_keys = 16, .simdgroups = 4}},
    {{.max_dim = 256, .source = kCounted}, {.row_groups = 2, .tile_keys = 16, .simdgroups = 4}},
    {{.max_dim = 576, .source = kCounted}, {.row_groups = 1, .tile_keys = 32, .simdgroups = 4}},
}};

struct BackwardTensorSizes {
  uint16_t row_groups;  // of 16 query rows
  uint16_t key_groups;  // of 16 keys
  uint16_t walked;      // keys or rows per step
  uint16_t shares;      // simdgroups that divide the columns of a gradient
};
using BackwardTensorRow = TuningRow<BackwardTensorSizes>;

// Both operands of the own rows, a staged step and, without registers, the gradients of a step take at most
// 31 KB of threadgroup memory. A gradient and two blocks of scores take 96 floats per lane at most. Products
// have the sizes of prefill's products. Nothing here was measured on an Apple GPU.
inline constexpr std::array<BackwardTensorRow, 6> kBackwardTensorTuning{{
    {{.max_dim = 64, .registers = true, .source = kCounted},
     {.row_groups = 4, .key_groups = 4, .walked = 32, .shares = 1}},
    {{.max_dim = 128, .registers = true, .source = kCounted},
     {.row_groups = 2, .key_groups = 2, .walked = 32, .shares = 1}},
    {{.max_dim = 96, .source = kCounted}, {.row_groups = 2, .key_groups = 2, .walked = 32, .shares = 1}},
    {{.max_dim = 128, .source = kCounted}, {.row_groups = 2, .key_groups = 1, .walked = 32, .shares = 1}},
    {{.max_dim = 256, .registers = true, .source = kCounted},
     {.row_groups = 1, .key_groups = 1, .walked = 16, .shares = 2}},
    {{.max_dim = 256, .source = kCounted}, {.row_groups = 1, .key_groups = 1, .walked = 16, .shares = 2}},
}};

// The row of a tensor table for a head size.
template <typename Table>
constexpr const auto& tensor_row(const Table& table, int64_t dim, bool registers) {
  const auto* found = table.begin();
  while (dim > found->scope.max_dim || found->scope.registers != registers) ++found;
  return *found;
}

struct BackwardSizes {
  uint16_t owned;       // fragments of eight rows or keys, of a group of simdgroups that divide the columns
  uint16_t groups;      // per threadgroup
  uint16_t walked;      // keys or rows per step
  uint16_t simdgroups;  // of all groups
};
using BackwardRow = TuningRow<BackwardSizes>;

// A simdgroup of backward_query holds the operands and the gradient of its rows, one of backward_key two
// operands and two gradients of its keys. For M1 and M2 these are the sizes with the fewest simulated cycles
// per product among those whose steps need at most 234 of a lane's 256 half registers by Mesa's count,
// without spills, and in 16 bits leave room for 384 threads on a core (bench/results/agx.json). There
// bfloat16 is multiplied as float32. Sizes for later chips were chosen by time on an NVIDIA H100. Nothing
// here was measured on an Apple GPU.
inline constexpr std::array<BackwardRow, 7> kBackwardQueryTuning{{
    {{.min_family = 9, .dtypes = k16Bit, .max_dim = 96, .source = kH100},
     {.owned = 2, .groups = 4, .walked = 32, .simdgroups = 4}},
    {{.min_family = 9, .dtypes = k16Bit, .max_dim = 128, .source = kH100},
     {.owned = 2, .groups = 2, .walked = 16, .simdgroups = 4}},
    {{.dtypes = k16Bit, .max_dim = 128, .source = kMesa},
     {.owned = 1, .groups = 4, .walked = 32, .simdgroups = 4}},
    {{.dtypes = k16Bit, .source = kMesa}, {.owned = 1, .groups = 2, .walked = 16, .simdgroups = 8}},
    {{.dtypes = kFloat32s, .max_dim = 80, .source = kMesa},
     {.owned = 1, .groups = 4, .walked = 16, .simdgroups = 4}},
    {{.dtypes = kFloat32s, .max_dim = 128, .source = kMesa},
     {.owned = 1, .groups = 2, .walked = 16, .simdgroups = 4}},
    {{.source = kMesa}, {.owned = 1, .groups = 2, .walked = 8, .simdgroups = 8}},
}};
inline constexpr std::array<BackwardRow, 12> kBackwardKeyTuning{{
    {{.min_family = 9, .dtypes = k16Bit, .max_dim = 64, .source = kH100},
     {.owned = 2, .groups = 4, .walked = 32, .simdgroups = 4}},
    {{.min_family = 9, .dtypes = k16Bit, .max_dim = 80, .source = kH100},
     {.owned = 1, .groups = 4, .walked = 32, .simdgroups = 4}},
    {{.min_family = 9, .dtypes = k16Bit, .max_dim = 128, .source = kH100},
     {.owned = 2, .groups = 4, .walked = 16, .simdgroups = 8}},
    {{.dtypes = k16Bit, .max_dim = 80, .source = kMesa},
     {.owned = 1, .groups = 4, .walked = 32, .simdgroups = 4}},
    {{.dtypes = k16Bit, .max_dim = 96, .source = kMesa},
     {.owned = 1, .groups = 4, .walked = 16, .simdgroups = 8}},
    {{.dtypes = k16Bit, .max_dim = 128, .source = kMesa},
     {.owned = 1, .groups = 2, .walked = 16, .simdgroups = 4}},
    {{.dtypes = k16Bit, .source = kMesa}, {.owned = 1, .groups = 2, .walked = 16, .simdgroups = 8}},
    {{.dtypes = kFloat32s, .max_dim = 32, .source = kMesa},
     {.owned = 1, .groups = 4, .walked = 32, .simdgroups = 4}},
    {{.dtypes = kFloat32s, .max_dim = 80, .source = kMesa},
     {.owned = 1, .groups = 4, .walked = 16, .simdgroups = 8}},
    {{.dtypes = kFloat32s, .max_dim = 96, .source = kMesa},
     {.owned = 1, .groups = 2, .walked = 16, .simdgroups = 4}},
    {{.dtypes = kFloat32s, .max_dim = 128, .source = kMesa},
     {.owned = 1, .groups = 2, .walked = 16, .simdgroups = 8}},
    {{.source = kMesa}, {.owned = 1, .groups = 2, .walked = 8, .simdgroups = 16}},
}};

struct DecodeSizes {
  uint16_t tile_keys;
  uint16_t simdgroups;
  uint16_t min_chunk;  // keys, for up to eight packed rows; at least a step of every simdgroup
  uint16_t threadgroups_per_core;
};
using DecodeRow = TuningRow<DecodeSizes>;

// The keys of a step leave registers for four threadgroups on a core of M1 and M2, for all options and
// numbers of packed rows: the largest part of a step needs at most 208 of a lane's 256 halves by the count of
// Mesa's compiler for these GPUs, without spills. D = 128 needs 171 in float16, 170 in bfloat16 and 163 in
// float32 without options, and 199, 205 and 187 with all compatible ones (bench/results/agx.json). These
// numbers of keys are also the fastest on an H200. Scales and decoding of a quantised cache take registers
// too; on M3 and later, float16 takes more keys than M1 and M2 have registers for. Nothing here was measured
// on an Apple GPU.
inline constexpr std::array<DecodeRow, 7> kDecodeTuning{{
    {{.min_family = 9, .dtypes = kFloat16s, .formats = kInt8AndFp8, .source = kH200},
     {.tile_keys = 16, .simdgroups = 4, .min_chunk = 64, .threadgroups_per_core = 3}},
    {{.formats = kQuantised, .max_dim = 64, .source = kMesa},
     {.tile_keys = 16, .simdgroups = 4, .min_chunk = 64, .threadgroups_per_core = 3}},
    {{.formats = kInt4s, .max_dim = 96, .source = kMesa},
     {.tile_keys = 16, .simdgroups = 4, .min_chunk = 64, .threadgroups_per_core = 3}},
    {{.formats = kQuantised, .source = kMesa},
     {.tile_keys = 8, .simdgroups = 4, .min_chunk = 64, .threadgroups_per_core = 3}},
    {{.dtypes = k16Bit, .max_dim = 96, .source = kMesaAndH200},
     {.tile_keys = 32, .simdgroups = 4, .min_chunk = 64, .threadgroups_per_core = 3}},
    {{.dtypes = kFloat32s, .source = kMesa},
     {.tile_keys = 8, .simdgroups = 4, .min_chunk = 64, .threadgroups_per_core = 3}},
    {{.source = kMesaAndH200},
     {.tile_keys = 16, .simdgroups = 4, .min_chunk = 64, .threadgroups_per_core = 3}},
}};

// Heads above this use decode_wide.metal, whose simdgroups divide the columns. `tile_keys` and `simdgroups`
// are for up to eight packed rows; more rows take fewer keys and more simdgroups. By the same count, float16
// needs at most 213 halves for up to 16 rows. Widened to float32, 16 rows of 512 columns need 240 and spill
// (bench/NOTES.md). A quantised cache needs as many as a cache in the operands' dtype, and twelve more for
// the scales of its rows.
inline constexpr int64_t kMaxRowDim = 128;
inline constexpr std::array<DecodeRow, 5> kDecodeWideTuning{{
    {{.dtypes = k16Bit, .max_dim = 192, .source = kMesa},
     {.tile_keys = 32, .simdgroups = 4, .min_chunk = 128, .threadgroups_per_core = 4}},
    {{.dtypes = k16Bit, .max_dim = 256, .source = kMesa},
     {.tile_keys = 32, .simdgroups = 8, .min_chunk = 128, .threadgroups_per_core = 2}},
    {{.dtypes = k16Bit, .source = kMesa},
     {.tile_keys = 16, .simdgroups = 8, .min_chunk = 128, .threadgroups_per_core = 2}},
    {{.max_dim = 256, .source = kMesa},
     {.tile_keys = 16, .simdgroups = 8, .min_chunk = 128, .threadgroups_per_core = 2}},
    {{.source = kMesa}, {.tile_keys = 16, .simdgroups = 16, .min_chunk = 128, .threadgroups_per_core = 1}},
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
    {{.dtypes = k16Bit, .source = kMesaAndH200},
     {.tile_keys = 32, .simdgroups = 4, .min_chunk = 64, .threadgroups_per_core = 4}},
    {{.source = kMesa}, {.tile_keys = 32, .simdgroups = 4, .min_chunk = 128, .threadgroups_per_core = 4}},
}};

template <typename Table>
const auto& tuning_row(const Table& table, const DeviceFacts& device, const Problem& p, DType dtype) {
  const auto* row = table.begin();
  while (!row->scope.has(device, p, dtype)) ++row;
  return *row;
}

}  // namespace fattn
