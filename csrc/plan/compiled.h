// What compiling a pipeline took, as plain data.
#pragma once

#include <string>
#include <vector>

#include "plan.h"

namespace fattn {

struct Compiled {
  KernelSpec spec;
  double library_seconds = 0.0;   // source to library; 0 where an earlier pipeline has the same library
  double pipeline_seconds = 0.0;  // library to what the GPU runs, and keeping it
  bool archived = false;          // that was kept by an earlier process
};

// As JSON text, a list.
std::string to_json(const std::vector<Compiled>& pipelines);

}  // namespace fattn
