// A compiled pipeline and its compile times, as plain data.
#pragma once

#include <string>
#include <vector>

#include "plan.h"

namespace fattn {

struct Compiled {
  KernelSpec spec;
  double library_seconds = 0.0;   // source to library; 0 if an earlier pipeline made the library
  double pipeline_seconds = 0.0;  // library to pipeline, and writing the archive
  bool archived = false;          // read from the archive of an earlier process
};

// Resources of a kernel that is compiled without max_total_threads_per_threadgroup.
struct Resources {
  KernelSpec spec;
  uint32_t max_threads = 0;  // per threadgroup
  uint32_t execution_width = 0;
  uint32_t static_bytes = 0;  // of threadgroup memory
};

// Return JSON lists.
std::string to_json(const std::vector<Compiled>& pipelines);
std::string to_json(const std::vector<Resources>& pipelines);

}  // namespace fattn
