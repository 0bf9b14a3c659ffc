// Counts the calls of torch's attention that ran here, and the calls that ran in torch, by reason.
#pragma once

#include <cstdint>
#include <string>

#include <c10/util/FunctionRef.h>

namespace fattn {

// Why a call runs in torch, in the order of the report.
enum class Reason : int64_t {
  kNone,  // it runs here
  kGradients,
  kMaskGradient,
  kWideGradient,
  kSmallTraining,
  kForwardMode,
  kDropout,
  kNested,
  kLayout,
  kSubclass,
  kTransform,
  kRank,
  kDevice,
  kDType,
  kMaskDType,
  kMaskWithCausal,
  kHeadDim,
  kShapes,
  kScale,
  kUnknownSizes,
  kMathAsked,
  kNoKernel,
  kTorchIsFaster,
  kRefused,
  kCount
};

enum class Taken : int64_t { kPrefill, kDecode, kTraining, kPacked, kPaged, kTraced, kCount };

void count(Taken taken);
// Counts a call with gradients, and the bytes that torch's own implementation would keep in addition.
void count_training(int64_t bytes_saved);
// Counts a reason, separately for traced calls, and keeps the first call as an example.
void count(Reason reason, bool traced, c10::function_ref<std::string()> example);

}  // namespace fattn
