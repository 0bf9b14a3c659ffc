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

// Returns a JSON list.
std::string to_json(const std::vector<Compiled>& pipelines);

}  // namespace fattn
