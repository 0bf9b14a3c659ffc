// certain: atomic<ushort> (MSL 2.6)
#include <metal_stdlib>
using namespace metal;
kernel void k(
    device atomic<ushort>* x [[buffer(0)]]) { // HERE
}
