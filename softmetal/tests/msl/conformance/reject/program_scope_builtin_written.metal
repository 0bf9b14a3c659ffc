// likely: a built-in at program scope is no variable of the program (MSL 5.2.3.6)
#include <metal_stdlib>
using namespace metal;
uint tid [[thread_position_in_grid]];
kernel void k(device uint* o) {
  tid = 3;  // HERE
  o[0] = tid;
}
