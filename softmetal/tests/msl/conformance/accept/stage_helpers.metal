// certain: helpers of vertex, fragment and mesh functions beside a kernel (MSL 6.10, 6.20)
#include <metal_stdlib>
using namespace metal;
struct V { float4 at [[position]]; float2 uv; };
struct I { float4 at [[position]]; interpolant<float2, interpolation::perspective> uv; };
struct Payload { uint n[4]; };
using M = metal::mesh<V, void, 32, 16, topology::triangle>;
static float4 shade(float2 uv) { return float4(dfdx(uv), dfdy(uv)) * fwidth(uv.x); }
static void kill(float a) { if (a < 0) discard_fragment(); }
void fill(object_data Payload* p, mesh_grid_properties g) { p->n[0] = 1; g.set_threadgroups_per_grid(uint3(1)); }
static void emit(M m, V v) { m.set_vertex(0, v); m.set_primitive_count(1); }
fragment float4 fs(V in [[stage_in]]) { kill(in.uv.x); return shade(in.uv); }
kernel void k(device float* o [[buffer(0)]]) { o[0] = 1; }
