// certain: twin of the refused program: thread_elements() is no float2 (Apple header: vec<T, 64>)
#include <metal_stdlib>
using namespace metal;
kernel void k(device float* x [[buffer(0)]], threadgroup float* t [[threadgroup(0)]], constant float& c [[buffer(1)]]) {
  simdgroup_float8x8 m(1.0f);
  thread float2& v = reinterpret_cast<thread float2&>(m.thread_elements());
  x[0] = v.x;
}
