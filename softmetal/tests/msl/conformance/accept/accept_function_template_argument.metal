// certain: functions as template arguments (llama.cpp kernel_mul_mm)
#include <metal_stdlib>
using namespace metal;
template <typename T> void dequantize(device const float* p, thread T& out) { out = p[0]; }
template <typename T, void (*read)(device const float*, thread T&)> kernel void f(device const float* x [[buffer(0)]], device T* y [[buffer(1)]]) {
  T value;
  read(x, value);
  y[0] = value;
}
typedef decltype(f<float, dequantize<float>>) f_t;
template [[host_name("f")]] kernel f_t f<float, dequantize<float>>;
