// Counts the calls of torch's attention that went to our ops, and those that went to torch's own, by reason.
#pragma once

#include <cstdint>
#include <string>

#include <c10/util/FunctionRef.h>

namespace fattn {

// Why a call goes to torch's own implementation. In the order of the report.
enum class Reason : int64_t {
  kNone,  // it goes to ours
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
// Counts a call with gradients, and the bytes that torch's own implementation would keep more.
void count_training(int64_t bytes_saved);
// Counts a reason, traced calls separately, and keeps the first call as an example.
void count(Reason reason, bool traced, c10::function_ref<std::string()> example);

}  // namespace fattn
