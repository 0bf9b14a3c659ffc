// certain: max_total_threads_per_threadgroup on templates (MSL specification 5.2.3, attributes of compute functions)
#include <metal_stdlib>
using namespace metal;
template <int N>
[[kernel, max_total_threads_per_threadgroup(N * 32)]] void k(device float* o [[buffer(0)]]) {
  o[0] = N;
}
template [[host_name("k4")]] [[kernel]] void k<4>(device float*);
