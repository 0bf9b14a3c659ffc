// likely: a kernel has no default arguments (MSL 5.1)
#include <metal_stdlib>
using namespace metal;
kernel void k(device uint* x [[buffer(0)]],
    uint i [[thread_position_in_grid]] = 0) { // HERE
  x[i] = 1;
}
