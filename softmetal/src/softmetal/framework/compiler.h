// Runs softmetal's MSL compiler (`python -m softmetal.msl compile`) as a child process.
#pragma once
#include <map>
#include <stdexcept>
#include <string>

namespace softmetal {

enum class Mode { kFast, kChecked };  // kChecked: instrumented for races, bounds, uninitialised reads, bytes
using Macros = std::map<std::string, std::string>;

struct CompileOptions {  // MTLCompileOptions as arguments of the compiler
  std::string language, math_mode, math_functions;
};

struct CompileError : std::runtime_error {
  using std::runtime_error::runtime_error;  // what(): the compiler's text, with lines of the MSL source
};

// Path of the compiled module. Throws CompileError.
std::string compile_msl(const std::string& source, const Macros& macros, const CompileOptions& options,
                        Mode mode);

}  // namespace softmetal
