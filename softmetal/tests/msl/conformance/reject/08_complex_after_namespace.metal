// likely: outside of a namespace the name is that of metal_types (naga #702)
#include <metal_stdlib>
using namespace metal;
namespace numbers {
using complex = float2;
}  // namespace numbers
using complex = float2;  // HERE
kernel void k(device complex* x [[buffer(0)]]) { x[0].x = 1; }
