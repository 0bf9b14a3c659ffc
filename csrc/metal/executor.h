// Runs a plan on torch's MPS stream. A plain C++ interface: Objective-C stays in csrc/metal.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "../plan/compiled.h"
#include "../plan/plan.h"

namespace fattn::metal {

// An offset in an MTLBuffer. The buffer of an absent operand is null.
struct BufferView {
  void* buffer = nullptr;
  int64_t byte_offset = 0;
};

class Bindings {
 public:
  BufferView& operator[](Slot operand) { return views_[operand]; }
  const BufferView& operator[](Slot operand) const { return views_[operand]; }

 private:
  std::array<BufferView, kSlotCount> views_{};
};

// The GPU of this process.
const DeviceFacts& device_facts();

// Encodes the passes of a plan, in order, on the current MPS stream, without a commit or wait. The memory of
// the bindings must stay allocated until this returns; torch's allocator frees it in stream order.
void execute(const Plan& plan, const Bindings& bindings);

// Compiles the pipelines of a plan without a launch.
void prepare(const Plan& plan);

// The pipelines of this process, in the order of compilation.
std::vector<Compiled> compiled_pipelines();

// Compiles the pipelines with these indices again, without the kernels' limit on threads, to which the
// compiler fits their registers. Caches nothing.
std::vector<Resources> resources_without_limit(const std::vector<int64_t>& numbers);

// Where compiled pipelines are kept between runs; empty: nowhere.
void set_archive_folder(const std::string& folder);

// The build of macOS, such as "25C56", which includes Metal's compiler; "" on other systems.
std::string system_build();

// Digest of kernels and planner. Measurements with another digest are ignored.
const char* source_digest();

}  // namespace fattn::metal
