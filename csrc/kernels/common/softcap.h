// Softcap (Gemma 2): cap * tanh(s / cap), for the scores of attention and for fattn.softcap.
#pragma once

#include <metal_stdlib>

using namespace metal;

namespace fattn {

// `argument` is s / cap. Apple's fast tanh returns NaN for a large one, where its exponential overflows; the
// precise one returns 1.
inline float softcapped(float argument, float cap) { return cap * precise::tanh(argument); }

// The derivative of softcapped() by s, from its result.
inline float softcap_slope(float capped, float cap) {
  const float t = capped / cap;
  return fma(-t, t, 1.0f);
}

}  // namespace fattn
