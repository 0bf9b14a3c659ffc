// certain: a member of a device struct object's this is device (MSL specification 4, member functions qualified with an address space; MLX steel/attn)
#include <metal_stdlib>
using namespace metal;
struct Node {
  int next;
  int value;
  int sum(device const Node* base) const device {
    device const Node* n = this;
    int s = 0;
    while (n->next >= 0) {
      s += n->value;
      n = base + n->next;
    }
    return s;
  }
};
kernel void k(device const Node* n [[buffer(0)]], device int* o [[buffer(1)]],
              uint i [[thread_position_in_grid]]) {
  o[i] = n[i].sum(n);
}
