#pragma once

#include <metal_stdlib>

using namespace metal;

namespace fattn {

inline float sigmoid(float x) { return 1.0f / (1.0f + precise::exp(-x)); }
inline float silu(float x) { return x / (1.0f + precise::exp(-x)); }

}  // namespace fattn
