#include "torch_errors.h"

#include <array>
#include <string>
#include <string_view>

#include <torch/library.h>

namespace fattn {
namespace {

struct Words {
  TorchError error;
  bool at_start;
  std::string_view words;
};
constexpr std::array<Words, 4> kWords{{
    {TorchError::kKernelGone, true, "SafeKernelFunction has been invalidated"},
    {TorchError::kOutOfMemory, false, "out of memory"},
    {TorchError::kOutOfMemory, true, "Invalid buffer size"},
    {TorchError::kNoData, false, "meta tensor"},
}};

TorchError error_said_by(std::string_view message) {
  for (const Words& row : kWords) {
    const size_t place = message.find(row.words);
    if (row.at_start ? place == 0 : place != std::string_view::npos) return row.error;
  }
  return TorchError::kOther;
}

std::string name_of_error(const std::string& message) {
  switch (error_said_by(message)) {
    case TorchError::kKernelGone:
      return "kernel_gone";
    case TorchError::kOutOfMemory:
      return "out_of_memory";
    case TorchError::kNoData:
      return "no_data";
    case TorchError::kOther:
      return "";
  }
  return "";
}

}  // namespace

TorchError torch_error_of(const c10::Error& error) {
  if (dynamic_cast<const c10::OutOfMemoryError*>(&error)) return TorchError::kOutOfMemory;
  return error_said_by(error.what_without_backtrace());
}

TORCH_LIBRARY_FRAGMENT(fattn, library) { library.def("_torch_error(str message) -> str", name_of_error); }

}  // namespace fattn
