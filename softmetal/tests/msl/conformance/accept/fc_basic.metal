// certain: function constants (MSL specification 5.8, function constants)
#include <metal_stdlib>
using namespace metal;
constant bool kA [[function_constant(0)]];
constant int kB [[function_constant(1)]];
constant bool kHasB = is_function_constant_defined(kB);
constant int kBd = is_function_constant_defined(kB) ? kB : 3;
constant bool kBoth = kA && kHasB;
kernel void k(device float* o [[buffer(0)]], device float* x [[buffer(1), function_constant(kA)]],
              uint i [[thread_position_in_grid]]) {
  if (kBoth) o[i] = kBd;
  if (kA) o[i] += x[i];
}
