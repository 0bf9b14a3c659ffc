// Functions of a number that norms and gates need.
#pragma once

#include <metal_stdlib>

using namespace metal;

namespace fattn {

inline float sigmoid(float x) { return 1.0f / (1.0f + precise::exp(-x)); }
inline float silu(float x) { return x / (1.0f + precise::exp(-x)); }

// `squares`: their sum over a row.
inline float inverse_rms(float squares, int columns, float eps) {
  return 1.0f / sqrt(squares / float(columns) + eps);
}

}  // namespace fattn
