// Soft-capping (Gemma 2): cap * tanh(s / cap), of attention's scores and of fattn.softcap.
#pragma once

#include <metal_stdlib>

using namespace metal;

namespace fattn {

// `argument` is s / cap. Apple's fast tanh makes NaN of a large one, by way of an infinite exponential; the
// precise one ends at 1.
inline float softcapped(float argument, float cap) { return cap * precise::tanh(argument); }

}  // namespace fattn
