// Compiles a library's source and loads its modules.
#include "program.h"

#include <cstdlib>
#include <utility>

#include "module_index.h"

namespace softmetal {
namespace {

std::string take(char* malloced, const char* otherwise) {
  std::string text = malloced ? malloced : otherwise;
  free(malloced);
  return text;
}

}  // namespace

Mode current_mode() { return softmetal_current_settings()->checks ? Mode::kChecked : Mode::kFast; }

Module::Module(const std::string& path, const ConstantsByIndex& constants) {
  std::vector<softmetal_constant> list;
  for (const auto& [index, value] : constants) list.push_back({index, value.bits});
  char* error = nullptr;
  loaded_ = softmetal_load(path.c_str(), list.data(), list.size(), &error);
  if (!loaded_) throw CompileError(take(error, "softmetal cannot load a compiled module"));
}

Module::~Module() { softmetal_unload(loaded_); }

const softmetal_module_table& Module::table() const { return *softmetal_table(loaded_); }

const softmetal_kernel* Module::find(const std::string& kernel) const {
  for (uint32_t i = 0; i < table().kernel_count; ++i)
    if (kernel == table().kernels[i].name) return &table().kernels[i];
  return nullptr;
}

Program::Program(std::string source, Macros macros, CompileOptions options, Mode mode)
    : source_(std::move(source)),
      macros_(std::move(macros)),
      options_(std::move(options)),
      first_mode_(mode) {
  Module module(module_path(mode), {});
  const softmetal_module_table& table = module.table();
  for (uint32_t i = 0; i < table.kernel_count; ++i) {
    const softmetal_kernel& kernel = table.kernels[i];
    kernel_names_.push_back(kernel.name);
    used_constants_[kernel.name].assign(kernel.constants, kernel.constants + kernel.constant_count);
  }
  for (uint32_t i = 0; i < table.function_constant_count; ++i) {
    const softmetal_function_constant_info& info = table.function_constants[i];
    constants_.push_back({info.name, info.index, info.type, info.required != 0});
  }
}

void Program::check_complete(const std::string& kernel, const ConstantsByIndex& values) const {
  for (uint32_t position : used_constants_.at(kernel)) {
    const Constant& constant = constants_.at(position);
    if (constant.required && !values.count(constant.index))
      throw CompileError("kernel '" + kernel + "' needs a value for its function constant '" + constant.name +
                         "' (index " + std::to_string(constant.index) + ")");
  }
}

const std::string& Program::module_path(Mode mode) {
  std::lock_guard lock(mutex_);
  std::string& path = paths_[size_t(mode)];
  if (path.empty()) path = compile_msl(source_, macros_, options_, mode);
  // A new pipeline also loads the mode that its library was made in, which was not requested.
  if (mode == current_mode()) log_request(path);
  return path;
}

Pipeline::Pipeline(std::shared_ptr<Program> program, std::string kernel, ConstantsByIndex constants)
    : program_(std::move(program)), name_(std::move(kernel)), constants_(std::move(constants)) {
  this->kernel();
}

const softmetal_kernel& Pipeline::kernel(Mode mode) {
  std::lock_guard lock(mutex_);
  std::unique_ptr<Module>& module = modules_[size_t(mode)];
  const std::string& path = program_->module_path(mode);  // logs every launch's module
  if (!module) module = std::make_unique<Module>(path, constants_);
  const softmetal_kernel* found = module->find(name_);
  if (!found) throw CompileError("the compiled module has no kernel '" + name_ + "'");
  return *found;
}

}  // namespace softmetal
