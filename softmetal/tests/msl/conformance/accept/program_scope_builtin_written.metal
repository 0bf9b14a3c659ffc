// likely: twin of the refused program: a built-in at program scope is no variable of the program (MSL 5.2.3.6)
#include <metal_stdlib>
using namespace metal;
const uint tid [[thread_position_in_grid]];
namespace n { ushort lane [[thread_index_in_simdgroup]]; uint f(uint a = tid) { return a + lane; } }
struct S { uint tid; uint get() const thread { return tid; } };
struct A { uint q; A(uint t) : q(t + tid) {} };
kernel void k(device uint* o) {
  S s{3};
  { uint tid = 4; o[tid] = s.get() + s.tid; }
  o[1] = tid + ::n::lane + n::f() + A(1).q;
}
