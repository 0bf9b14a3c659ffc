// A library's source as compiled modules, and a pipeline as a private copy of one of them with its function
// constants set.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "../simt/abi.h"
#include "compiler.h"

namespace softmetal {

struct ConstantValue {
  uint32_t type;  // MTLDataType
  uint64_t bits;
};
using ConstantsByIndex = std::map<uint32_t, ConstantValue>;

Mode current_mode();  // the mode for a dispatch under the current settings

class Module {  // a loaded copy with its own constants
 public:
  Module(const std::string& path, const ConstantsByIndex& constants);
  ~Module();
  Module(const Module&) = delete;
  Module& operator=(const Module&) = delete;
  const softmetal_module_table& table() const;
  const softmetal_kernel* find(const std::string& kernel) const;  // null if the module has no such kernel

 private:
  softmetal_loaded* loaded_;
};

class Program {
 public:
  // Compiles in `mode`; throws CompileError. The module of the other mode is compiled at its first use.
  Program(std::string source, Macros macros, CompileOptions options, Mode mode);
  const std::string& module_path(Mode mode);
  Mode first_mode() const { return first_mode_; }
  const Macros& macros() const { return macros_; }
  const std::vector<std::string>& kernel_names() const { return kernel_names_; }
  struct Constant {
    std::string name;
    uint32_t index, type;
    bool required;
  };
  const std::vector<Constant>& constants() const { return constants_; }
  // Throws CompileError if `kernel` reads a required function constant that has no value.
  void check_complete(const std::string& kernel, const ConstantsByIndex& values) const;

 private:
  std::string source_;
  Macros macros_;
  CompileOptions options_;
  Mode first_mode_;
  std::mutex mutex_;
  std::string paths_[2];
  std::vector<std::string> kernel_names_;
  std::vector<Constant> constants_;
  std::map<std::string, std::vector<uint32_t>> used_constants_;  // by kernel: positions in constants_
};

class Pipeline {
 public:
  Pipeline(std::shared_ptr<Program> program, std::string kernel, ConstantsByIndex constants);
  const softmetal_kernel& kernel(Mode mode);
  // For properties that are equal in both modes: arguments and limits.
  const softmetal_kernel& kernel() { return kernel(program_->first_mode()); }
  const Macros& macros() const { return program_->macros(); }

 private:
  std::shared_ptr<Program> program_;
  std::string name_;
  ConstantsByIndex constants_;
  std::mutex mutex_;
  std::unique_ptr<Module> modules_[2];
};

}  // namespace softmetal
