// The runtime functions of tensor operations (msl/common/matmul2d.h).
#include "abi.h"
#include "checks/checker.h"
#include "dispatch.h"
#include "report.h"
#include "worker.h"

namespace softmetal {
namespace {

const softmetal_settings& settings() { return current_worker->dispatch->settings; }

std::string extent_message(const char* side, int64_t k, int64_t extent) {
  return "matmul2d multiplies " + std::to_string(k) + " along K, but its " + side + " operand has " +
         std::to_string(extent) + "; give the descriptor a dynamic K, or a tensor that has them all";
}

std::string misuse_message(uint32_t misuse, int64_t found, int64_t other) {
  switch (misuse) {
    case SOFTMETAL_TENSOR_SHORT_LEFT:
      return extent_message("left", found, other);
    case SOFTMETAL_TENSOR_SHORT_RIGHT:
      return extent_message("right", found, other);
    case SOFTMETAL_TENSOR_STRIDE:
      return "an operand of matmul2d has elements " + std::to_string(found) +
             " apart in its inner dimension; its stride must be 1";
    default:
      return "matmul2d of " + std::to_string(found) + " simdgroups in a threadgroup of " +
             std::to_string(other) + "; execution_simdgroups takes the number of the threadgroup's";
  }
}

}  // namespace
}  // namespace softmetal

using namespace softmetal;

extern "C" {

const softmetal_tensor_placement* softmetal_tensor_place(uint32_t role, uint32_t rows, uint32_t columns,
                                                         uint32_t threads) {
  return current_worker->places.find(settings().tensor_layout, settings().tensor_seed,
                                     {role, rows, columns, threads});
}

float softmetal_tensor_outside(void) {
  return settings().tensor_layout == SOFTMETAL_LAYOUT_RANDOM ? __builtin_nanf("") : 0.0f;
}

void softmetal_tensor_poison(void* elements, uint64_t size) { __builtin_memset(elements, 0xff, size); }

void softmetal_tensor_access(void* elements, uint64_t element_size,
                             const softmetal_tensor_placement* placement, uint32_t thread, uint32_t kind) {
  Checker* checks = current_worker->checker;
  if (!checks) return;
  const auto pc = reinterpret_cast<uintptr_t>(__builtin_return_address(0));
  for (uint32_t i = 0; i < placement->capacity; i++)
    if (placement->at[thread * placement->capacity + i] >= 0)
      checks->access_private(*current_fiber, static_cast<char*>(elements) + i * element_size, element_size,
                             kind, pc);
}

void softmetal_tensor_slot(int64_t index, uint64_t capacity) {
  Checker* checks = current_worker->checker;
  if (checks && static_cast<uint64_t>(index) >= capacity)
    checks->report_index(*current_fiber, "cooperative tensor", index, capacity, "",
                         reinterpret_cast<uintptr_t>(__builtin_return_address(0)));
}

void* softmetal_scratch(uint64_t size) {
  std::vector<char>& memory = current_worker->scratch;
  if (memory.size() < size) memory.resize(size);
  return memory.data();
}

void softmetal_tensor_fail(uint32_t misuse, int64_t found, int64_t other, int line) {
  Fiber* me = current_fiber;
  me->line = line;
  me->pc = __builtin_return_address(0);
  me->frame = current_worker->strict ? static_cast<void**>(__builtin_frame_address(0)) : nullptr;
  current_worker->fail(me, tensor_message(*current_worker, *me, misuse_message(misuse, found, other)));
}

}  // extern "C"
