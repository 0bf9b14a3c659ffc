// Random generators on mps, which draw from a CPU generator.
#pragma once
#include <ATen/core/Generator.h>

namespace softmetal {
const at::Generator& default_generator();
at::Generator new_generator();
at::Generator host_generator(
    const at::Generator& generator);  // the CPU generator behind an mps one, else itself
}  // namespace softmetal
