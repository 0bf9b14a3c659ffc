// What became of the calls that were made to torch or in its name: how many went to our ops, how many to
// torch's own, and why.
#pragma once

#include <cstdint>
#include <string>

#include <c10/util/FunctionRef.h>

namespace fattn {

// Why a call goes to torch's own implementation. The order is that of the report.
enum class Reason : int64_t {
  kNone,  // it does not
  kGradients,
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

enum class Taken : int64_t { kPrefill, kDecode, kPacked, kPaged, kTraced, kCount };

void count(Taken taken);
// Counts, apart for calls that are only traced, and keeps an example of a reason as text.
void count(Reason reason, bool traced, c10::function_ref<std::string()> example);

}  // namespace fattn
