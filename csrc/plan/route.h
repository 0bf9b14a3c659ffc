// Routes plain calls of torch's attention to our kernels or to torch's own. Ours run unless they are expected
// to be slower. torch's kernels and the comparisons are tables: the first matching row wins, and the last row
// of each table matches everything.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "supported.h"
#include "tuning.h"

namespace fattn {

// A call of F.scaled_dot_product_attention that our kernels could compute.
struct PlainCall {
  DType dtype = DType::kFloat32;
  DType mask_dtype = DType::kOther;  // kOther: no attn_mask
  int64_t batch = 0;
  int64_t q_heads = 0;
  int64_t q_len = 0;
  int64_t kv_len = 0;
  int64_t head_dim = 0;
  int64_t value_dim = 0;
  bool is_causal = false;

  bool is_padded() const {  // for our kernels
    return head_dim % kHeadDimMultiple != 0 || value_dim % kHeadDimMultiple != 0;
  }
  double products() const {
    return double(batch) * double(q_heads) * double(q_len) * double(kv_len) * double(head_dim + value_dim);
  }
};

// How torch's MPS backend computes attention: aten/src/ATen/native/mps/operations/Attention.mm.
enum class TorchWay : uint8_t {
  kVector,    // few rows; K and V are read once per query row and head
  kTensor,    // Metal 4's matmul2d: matrix units on M5, simdgroup matrices on older GPUs
  kMatrices,  // simdgroup matrices
  kScores,    // MPSGraph, with all scores in memory
};

// torch runs a call in one dispatch. With more products than this many slices of ours (slices.h), which are a
// second of an M1 core, macOS might kill it.
inline constexpr double kMaxSlicesInTorch = 8;

inline constexpr int64_t kAnyNumber = int64_t(1) << 62;
using Dims = std::array<uint16_t, 7>;  // head sizes; all 0: any
inline constexpr Dims kAnyDims{};

// torch's kernels need values as wide as keys, and a mask that is bool or of the query's dtype.
struct TorchKernelRow {
  TorchWay way;
  int min_torch;  // 2.14 as 214
  int min_macos;  // 26.2 as 2602
  uint8_t dtypes;
  Dims dims;
  int64_t min_rows;
  int64_t max_rows;
};

inline constexpr std::array<TorchKernelRow, 4> kTorchKernels{{
    {TorchWay::kVector, 0, 0, kAnyDType, {64, 96, 128, 256}, 1, 8},
    {TorchWay::kTensor, 214, 2602, k16Bit, {64, 96, 128, 256}, 9, kAnyNumber},
    {TorchWay::kMatrices, 0, 0, kAnyDType, {32, 64, 72, 80, 96, 128, 256}, 9, kAnyNumber},
    {TorchWay::kScores, 0, 0, kAnyDType, kAnyDims, 0, kAnyNumber},
}};

struct RouteRow {
  uint8_t ways;  // as bits 1 << TorchWay
  int min_family;
  bool padded;    // only calls whose heads our kernels must pad
  bool no_units;  // only calls that our kernels run without matrix units
  int64_t min_rows;
  int64_t max_rows;
  int64_t min_keys;
  bool to_torch;
  const char* provenance;
};
constexpr uint8_t set_of(TorchWay way) { return uint8_t(1u << unsigned(way)); }
inline constexpr uint8_t kAnyWay = 0xff;

// No row was measured with our kernels on an Apple GPU. The H200 ran the same Metal sources, translated.
// Published figures come from other kernels of the same design.
inline constexpr std::array<RouteRow, 8> kRoutes{{
    {set_of(TorchWay::kTensor), 10, false, true, 64, kAnyNumber, 1, true,
     "torch's prefill runs on the matrix units of M5 and ours does not; kernels on them are published at 1.5 "
     "to "
     "3.6 times the rate of simdgroup matrices (mtlattn and vllm-metal on M5 Pro, xwen on M5 Max)"},
    {set_of(TorchWay::kTensor), 10, false, false, 64, kAnyNumber, 1, false,
     "both run on the matrix units of M5; ours was not compared with torch's"},
    {set_of(TorchWay::kTensor), 10, false, false, 0, kAnyNumber, 0, false,
     "torch's tile has 64 rows; for 12 rows, MLX's of that size took twice as long as a kernel for few rows "
     "(published, M5 Max, MLX pull request 3838)"},
    {set_of(TorchWay::kTensor), kAnyFamily, false, false, 0, kAnyNumber, 0, false,
     "before M5, torch's matmul2d has no units of its own: mtlattn's kernel with it made 1.9 TFLOP/s where "
     "MPSGraph made 3.1 (published, M4); torch's was not compared with ours"},
    {set_of(TorchWay::kVector), kAnyFamily, false, false, 0, kAnyNumber, 0, false,
     "torch's decode took 1.16 to 4.4 times as long on an H200 where heads share 256 keys or more, 1.02 "
     "where none do; not compared on an Apple GPU"},
    {set_of(TorchWay::kScores), kAnyFamily, true, false, 0, 8, 256, true,
     "our kernels would need the heads padded: for so few rows, the copy of all keys and values moves more "
     "bytes "
     "than torch's scores (by count)"},
    {set_of(TorchWay::kScores), kAnyFamily, false, false, 0, kAnyNumber, 0, false,
     "torch holds all scores in memory here, which took 1.1 to 44 times as long as its own kernels that do "
     "not "
     "(published, pytorch pull requests 181575 and 181852)"},
    {kAnyWay, kAnyFamily, false, false, 0, kAnyNumber, 0, false,
     "baseline: torch's simdgroup prefill took 1.6 to 3.2 times as long on an H200; not compared on an Apple "
     "GPU"},
}};

// Calls that are timed against torch: plain calls, which run as a prefill or, for one row, as a decode; and
// forward and backward together.
enum class Routed : uint8_t { kPrefill, kDecode, kTraining, kTrainingCausal };
constexpr bool is_training(Routed op) { return op == Routed::kTraining || op == Routed::kTrainingCausal; }

// A route that was timed on exactly this GPU, system and torch (tuned.h); precedes the table.
struct TunedRoute {
  Routed op = Routed::kPrefill;
  DType dtype = DType::kFloat32;
  int64_t dim = 0;         // of keys and values
  int64_t min_length = 0;  // rows of a prefill, keys of a decode, the smaller of both in training
  int64_t max_length = kAnyNumber;
  int macos = 0;
  int torch = 0;
  bool to_torch = false;
};

enum class RoutePolicy : uint8_t { kAuto, kAlways };  // FATTN_ROUTE

// What to do with calls that need gradients: install(training=...).
enum class TrainingPolicy : uint8_t { kAuto, kFused, kOff };

// torch's own attention keeps the weights until the backward, in float32 for every dtype.
int64_t bytes_kept_by_torch(const PlainCall& call);
// Ours keeps lse, and the result in float32 or in 16 bits with its remainder. Both also keep the operands.
int64_t bytes_kept(const PlainCall& call);

struct Route {
  bool to_torch = false;
  const char* provenance = "";
};

// torch's backward multiplies large matrices, which can be faster than recomputing the scores: published for
// MLX on an M3 Max, a fused backward took 0.73 to 0.85 times as long in causal calls of heads of 64 and 96,
// and 1.3 to 2.8 times as long in others. Memory is checked first, then speed: if the weights take at least
// this fraction of the working set, our kernels run. Below it 32 layers keep less than an eighth, and the
// faster one runs: by a tuned route, else torch's.
inline constexpr int64_t kTrainingFraction = 256;
Route training_route(const PlainCall& call, const DeviceFacts& device, TrainingPolicy policy);

TorchWay torch_way(const PlainCall& call, const DeviceFacts& device);
Route route_of(const PlainCall& call, const DeviceFacts& device, RoutePolicy policy);
// Whether any plain call whose heads need no padding could go to torch on this device.
bool may_go_to_torch(const DeviceFacts& device, RoutePolicy policy);

// The macOS version of a kernel's name and release: 2602 for "Darwin" "25.2.0", 0 for other systems.
// Foundation reports an older version to a Python that was built with an older SDK.
int macos_of_kernel(const std::string& name, const std::string& release);

}  // namespace fattn
