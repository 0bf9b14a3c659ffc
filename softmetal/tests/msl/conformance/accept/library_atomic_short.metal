// certain: twin of the refused program: atomic<ushort> (MSL 2.6)
#include <metal_stdlib>
using namespace metal;
kernel void k(
    device atomic<uint>* x [[buffer(0)]]) {
}
