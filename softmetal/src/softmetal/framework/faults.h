// Faults that a test injects into kernels, to simulate another GPU or compiler.
#pragma once
#include <cstdint>
#include <string>

#include "../simt/abi.h"
#include "compiler.h"

extern "C" {
// A fault of the kernels with this name, in libraries that were compiled with this macro.
struct softmetal_fault {
  const char* kernel;
  const char* macro;      // "NAME=VALUE", or "" for any library
  uint32_t fails;         // 1: its library does not compile
  uint32_t stops;         // 1: a dispatch ends in an error, and writes nothing
  uint32_t delay_ms;      // added to the compile time of its library
  uint32_t max_threads;   // upper bound of the limit that its pipeline reports; 0: none
  int32_t slot;           // a dispatch flips bits in the buffer of this slot; -1: none
  uint32_t flipped;       // the bits of a 32-bit word
  uint64_t byte;          // offset of the word in the binding
  uint64_t least_groups;  // dispatches of fewer threadgroups are right
};
// Called by softmetal/faults.py. Returns a number for the other two.
int softmetal_add_fault(const softmetal_fault*);
uint64_t softmetal_fault_hits(int number);  // how often it took effect
void softmetal_remove_fault(int number);
}

namespace softmetal {

// Delays the compilation of a kernel's library, and throws CompileError if it fails.
void fault_compilation(const std::string& kernel, const Macros& macros);
// Throws std::runtime_error if a dispatch ends in an error.
void fault_dispatch(const std::string& kernel, const Macros& macros);
uint32_t faulty_max_threads(const std::string& kernel, const Macros& macros, uint32_t threads);
void fault_results(const std::string& kernel, const Macros& macros, uint64_t groups,
                   const softmetal_arguments& arguments);

}  // namespace softmetal
