// worth: the same attribute on two parameters
#include <metal_stdlib>
using namespace metal;
kernel void k(device int* x [[buffer(0)]], uint i [[thread_position_in_grid]], uint j [[thread_position_in_grid]]) { x[i]=j; }  // HERE
