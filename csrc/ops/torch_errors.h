// Classifies errors of torch by their message. Messages may change, so tests/refusals/test_torch_errors.py
// provokes each error with the installed torch.
#pragma once

#include <c10/util/Exception.h>

namespace fattn {

enum class TorchError {
  kOther,
  kKernelGone,   // a kernel was called whose library has been destroyed
  kOutOfMemory,  // also for a buffer larger than the Metal device allows
  kNoData,       // something read the elements of a tensor on "meta"
};

TorchError torch_error_of(const c10::Error& error);

}  // namespace fattn
