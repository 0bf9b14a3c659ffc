// certain: constant constexpr forms (MSL specification 4.3, constant memory)
#include <metal_stdlib>
using namespace metal;
constant constexpr float a = 1.5f;
constexpr constant int b = 3;
static constant constexpr uint c = b * 2;
static constexpr constant half d[2] = {1.0h, 2.0h};
constant float e[] = {1.0f, a, a * 2};
constexpr int sq(int n) { return n * n; }
constant int s = sq(4);
struct Row {
  int a;
  float b;
};
constant Row rows[2] = {{1, 2.0f}, {3, 4.0f}};
template <int N>
constant constexpr int kPow = N * N;
namespace n {
constant constexpr int q = 4;
}
struct St {
  static constant constexpr int w = 8;
};
kernel void k(device float* o [[buffer(0)]]) {
  float t[s];
  t[0] = a + b + c + d[1] + e[1] + rows[1].b + kPow<3> + n::q + St::w;
  o[0] = t[0];
}
