// What an error of torch means, where torch says it in the words of its message alone. They may change with
// torch: tests/refusals/test_torch_errors.py provokes each with the torch at hand.
#pragma once

#include <c10/util/Exception.h>

namespace fattn {

enum class TorchError {
  kOther,
  kKernelGone,   // a kernel was called whose library has been destroyed
  kOutOfMemory,  // also of a buffer that no Metal device can have
  kNoData,       // something read the elements of a tensor on "meta"
};

TorchError torch_error_of(const c10::Error& error);

}  // namespace fattn
