// certain: twin of the refused program: no reference to an element of a simdgroup_matrix, as of a vector
#include <metal_stdlib>
using namespace metal;
kernel void k(device float* o, constant int& n) {
  simdgroup_float8x8 m(1.0f);
  float e = n > 0 ? m.thread_elements()[0] : m.thread_elements()[1];
  o[0] = e;
}
