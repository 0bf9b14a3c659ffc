// certain: typeid
#include <metal_stdlib>
using namespace metal;
kernel void k(device int* x [[buffer(0)]]) { auto& t = typeid(int); x[0]=1; }  // HERE
