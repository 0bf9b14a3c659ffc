// The callbacks of modules compiled in checked mode.
#include "../worker.h"
#include "checker.h"

using namespace softmetal;

namespace {

// Null outside kernels, for example in a module's initialisers.
Checker* checker() { return current_fiber ? current_worker->checker : nullptr; }

bool on_stack(const Fiber& me, const void* address) {
  return reinterpret_cast<uintptr_t>(address) - reinterpret_cast<uintptr_t>(me.stack_low) < kStackBytes;
}

uintptr_t caller() __attribute__((always_inline));
uintptr_t caller() { return reinterpret_cast<uintptr_t>(__builtin_return_address(0)); }

}  // namespace

extern "C" {

void* softmetal_access(void* address, uint64_t size, uint32_t kind) {
  Checker* checks = checker();
  if (!checks || !size) return address;
  if (!on_stack(*current_fiber, address))
    return checks->access(*current_fiber, address, size, kind, caller());
  checks->access_private(*current_fiber, address, size, kind, caller());
  return address;
}

void softmetal_object_access(void* address, uint64_t size, uint32_t kind, void* object, uint64_t object_size,
                             const char* name) {
  Checker* checks = checker();
  if (!checks || !size) return;
  checks->check_object(*current_fiber, address, size, kind, object, object_size, name, caller());
  if (on_stack(*current_fiber, address))
    checks->access_private(*current_fiber, address, size, kind, caller());
  else
    checks->access(*current_fiber, address, size, kind, caller());
}

void softmetal_alignment(void* address, uint64_t alignment) {
  Checker* checks = checker();
  if (checks && !on_stack(*current_fiber, address))
    checks->check_alignment(*current_fiber, address, alignment, caller());
}

void softmetal_private_begin(void* array, uint64_t size, const char* name) {
  if (Checker* checks = checker()) checks->begin_private(*current_fiber, array, size, name);
}
void softmetal_private_end(void* array, uint64_t size) {
  if (Checker* checks = checker()) checks->end_private(*current_fiber, array, size);
}
void softmetal_private_written(void* array) {
  if (Checker* checks = checker()) checks->fill_private(*current_fiber, array);
}

void softmetal_index(void* array, int64_t index, uint64_t count, const char* name) {
  Checker* checks = checker();
  if (checks && on_stack(*current_fiber, array))
    checks->report_index(*current_fiber, "private array", index, count, name, caller());
}

void softmetal_component(int64_t index, uint64_t count, const char* name) {
  if (Checker* checks = checker())
    checks->report_index(*current_fiber, "vector", index, count, name, caller());
}

}  // extern "C"
