// certain: enums and unions (MSL specification 1.5: C++14)
#include <metal_stdlib>
using namespace metal;
enum Mode : uchar { kA, kB = 4 };
enum class Op : uint { add = 1, mul };
union U {
  uint u;
  float f;
  half2 h;
};
kernel void k(device uint* o [[buffer(0)]], constant Mode& m [[buffer(1)]], constant Op& p [[buffer(2)]]) {
  U u;
  u.f = 2;
  switch (p) {
    case Op::add:
      o[0] = u.u;
      break;
    case Op::mul:
      o[1] = m;
      break;
  }
  o[2] = static_cast<uint>(p) + (m == kB);
}
