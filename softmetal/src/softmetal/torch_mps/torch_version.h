// Macros that select between versions of torch.
#pragma once
#include <torch/version.h>

#define SOFTMETAL_TORCH_AT_LEAST(major, minor) \
  (TORCH_VERSION_MAJOR > (major) || (TORCH_VERSION_MAJOR == (major) && TORCH_VERSION_MINOR >= (minor)))

// Up to 2.13 there is one stream for all threads.
#define SOFTMETAL_TORCH_HAS_STREAMS SOFTMETAL_TORCH_AT_LEAST(2, 14)
