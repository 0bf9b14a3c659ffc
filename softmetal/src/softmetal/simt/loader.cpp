// Loads compiled kernel modules. A pipeline is a private copy of the module's image: function constants are
// read by its dynamic initialisers, so two pipelines with different constants cannot share one.
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <link.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <unordered_set>

#include "module.h"

struct softmetal_loaded : softmetal::Module {};

namespace softmetal {
namespace {

struct PendingConstants {
  const softmetal_constant* constants;
  size_t count;
};
thread_local const PendingConstants* pending_constants =
    nullptr;  // while dlopen runs a module's initialisers

std::mutex modules_mutex;
std::unordered_set<const Module*> modules;

// The dynamic linker identifies libraries by name and inode: the copy needs new ones.
std::string copy_file(const std::string& from) {
  static std::atomic<uint64_t> serial{0};
  const char* directory = getenv("TMPDIR");
  std::string to = std::string(directory && *directory ? directory : "/tmp") + "/softmetal-" +
                   std::to_string(getpid()) + "-" + std::to_string(serial++) + ".so";
  int in = open(from.c_str(), O_RDONLY | O_CLOEXEC);
  if (in < 0) throw std::runtime_error("cannot read " + from + ": " + strerror(errno));
  int out = open(to.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0700);
  struct stat info{};
  bool good = out >= 0 && fstat(in, &info) == 0;
  for (off_t left = info.st_size; good && left > 0;) {
    ssize_t n = sendfile(out, in, nullptr, static_cast<size_t>(left));
    good = n > 0;
    left -= n;
  }
  int cause = errno;
  if (out >= 0) close(out);
  close(in);
  if (!good) {
    unlink(to.c_str());
    throw std::runtime_error("cannot copy " + from + " to " + to + ": " + strerror(cause));
  }
  return to;
}

// Modules resolve the softmetal_* and sanitizer-coverage symbols in the global scope, and a host may have
// loaded us locally.
void export_runtime_symbols() {
  Dl_info self{};
  dladdr(reinterpret_cast<void*>(&export_runtime_symbols), &self);
  dlopen(self.dli_fname, RTLD_NOW | RTLD_GLOBAL | RTLD_NOLOAD);
}

void find_image(Module& module) {
  auto* map = static_cast<link_map*>(module.handle);
  module.base = map->l_addr;
  module.low = ~uintptr_t{0};
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* data) {
        auto* m = static_cast<Module*>(data);
        if (info->dlpi_addr != m->base) return 0;
        for (int i = 0; i < info->dlpi_phnum; i++) {
          const auto& segment = info->dlpi_phdr[i];
          if (segment.p_type != PT_LOAD) continue;
          m->low = std::min<uintptr_t>(m->low, m->base + segment.p_vaddr);
          m->high = std::max<uintptr_t>(m->high, m->base + segment.p_vaddr + segment.p_memsz);
        }
        return 1;
      },
      &module);
}

std::unique_ptr<softmetal_loaded> load(const char* path, PendingConstants constants) {
  static std::once_flag exported;
  std::call_once(exported, export_runtime_symbols);
  std::string copy = copy_file(path);
  pending_constants = &constants;
  void* handle = dlopen(copy.c_str(), RTLD_NOW | RTLD_LOCAL);
  pending_constants = nullptr;
  unlink(copy.c_str());
  if (!handle) throw std::runtime_error(std::string("cannot load ") + path + ": " + dlerror());
  auto module = std::make_unique<softmetal_loaded>();
  module->handle = handle;
  module->path = path;
  module->table = static_cast<const softmetal_module_table*>(dlsym(handle, "softmetal_module"));
  if (!module->table || module->table->abi_version != SOFTMETAL_ABI_VERSION) {
    dlclose(handle);
    throw std::runtime_error(std::string(path) + " is not a kernel module of ABI version " +
                             std::to_string(SOFTMETAL_ABI_VERSION) + "; compile it again");
  }
  find_image(*module);
  return module;
}

}  // namespace

const Module* module_of(const softmetal_kernel* kernel) {
  std::lock_guard lock(modules_mutex);
  for (const Module* m : modules)
    if (kernel >= m->table->kernels && kernel < m->table->kernels + m->table->kernel_count) return m;
  return nullptr;
}

}  // namespace softmetal

extern "C" {

softmetal_loaded* softmetal_load(const char* path, const softmetal_constant* constants, size_t count,
                                 char** error) {
  try {
    auto module = softmetal::load(path, {constants, count});
    std::lock_guard lock(softmetal::modules_mutex);
    softmetal::modules.insert(module.get());
    return module.release();
  } catch (const std::exception& e) {
    *error = strdup(e.what());
    return nullptr;
  }
}

const softmetal_module_table* softmetal_table(const softmetal_loaded* module) { return module->table; }

void softmetal_unload(softmetal_loaded* module) {
  if (!module) return;
  {
    std::lock_guard lock(softmetal::modules_mutex);
    softmetal::modules.erase(module);
  }
  dlclose(module->handle);
  delete module;
}

bool softmetal_function_constant(uint32_t index, uint64_t* bits) {
  const auto* pending = softmetal::pending_constants;
  for (size_t i = 0; pending && i < pending->count; i++)
    if (pending->constants[i].index == index) {
      *bits = pending->constants[i].bits;
      return true;
    }
  return false;
}

}  // extern "C"
