// certain: twin of the refused program: positions are ushort or uint (MSL 5.2.3.6)
#include <metal_stdlib>
using namespace metal;
kernel void k(device uint* x [[buffer(0)]], 
    ushort p [[thread_position_in_grid]]) {
  x[p] = 1;
}
