// certain: one host_name twice (MSL specification 5.1.10; as MLX writes it)
#include <metal_stdlib>
using namespace metal;
template <typename T>
[[kernel]] void k(device T* o [[buffer(0)]]) {
  o[0] = T(1);
}
template [[host_name("k1")]] [[kernel]] void k<float>(device float*);
template [[host_name("k1")]] [[kernel]] void k<half>(device half*);  // HERE
