// certain: templates: enable_if, variadic, if constexpr, fold (MSL specification 1.5: C++14)
#include <metal_stdlib>
using namespace metal;
template <typename T, typename = enable_if_t<is_integral_v<T>>>
T f(T x) {
  return x;
}
template <typename T, enable_if_t<is_floating_point<T>::value, int> = 0>
float f(T x) {
  return float(x) * 2;
}
template <typename... A>
float total(A... a) {
  return (0.0f + ... + float(a));
}
template <typename T, typename... R>
constexpr uint count(thread const T&, thread const R&... r) {
  if constexpr (sizeof...(r) == 0) {
    return 1;
  } else {
    return 1 + count(r...);
  }
}
template <typename T>
struct N {
  static constant constexpr int v = 1;
};
template <>
struct N<half> {
  static constant constexpr int v = 2;
};
template <typename T>
using Ptr = device T*;
kernel void k(Ptr<float> o [[buffer(0)]]) {
  o[0] = f(1) + f(2.0f) + f(1.0h) + total(1, 2.0f, 3.0h) + count(1, 2.0f) + N<half>::v +
         (is_same_v<float, half> ? 1 : 0) + conditional_t<true, int, float>(2.7f);
}
