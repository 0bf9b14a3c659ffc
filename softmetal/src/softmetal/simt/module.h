// A loaded kernel module, and its lookup from a kernel or an address.
#pragma once

#include <stdint.h>

#include <string>

#include "abi.h"

namespace softmetal {

struct Module {
  void* handle = nullptr;
  const softmetal_module_table* table = nullptr;
  std::string path;                       // the compiled file; the loaded private copy is already unlinked
  uintptr_t base = 0, low = 0, high = 0;  // load bias, and the range of addresses that the image occupies
  bool contains(uintptr_t address) const { return address >= low && address < high; }
};

// The loaded module that contains this kernel; null for one that softmetal_load did not return.
const Module* module_of(const softmetal_kernel*);

}  // namespace softmetal
