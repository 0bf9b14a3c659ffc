// certain: function constants tested inside templates (MSL specification 5.8, function constants)
#include <metal_stdlib>
using namespace metal;
constant bool kCausal [[function_constant(300)]];
constant bool kMask [[function_constant(301)]];
template <typename T, int N>
void work(device T* o, uint i) {
  if (kCausal) {
    o[i] = T(N);
  } else if (kMask) {
    o[i] = T(0);
  }
}
template <typename T>
[[kernel]] void k(device T* o [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  work<T, 4>(o, i);
}
template [[host_name("k_f")]] [[kernel]] void k<float>(device float*, uint);
template [[host_name("k_h")]] [[kernel]] void k<half>(device half*, uint);
