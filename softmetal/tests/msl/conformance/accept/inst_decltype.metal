// certain: MLX's instantiation by decltype (MSL specification 5.1.10; as MLX writes it)
#include <metal_stdlib>
using namespace metal;
template <typename T, int N = 2>
[[kernel]] void k(device T* o [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  o[i] = T(N);
}
template [[host_name("k_a")]] [[kernel]] decltype(k<float>) k<float>;
typedef decltype(k<half, 3>) k_t;
template [[host_name("k_b")]] [[kernel]] k_t k<half, 3>;
