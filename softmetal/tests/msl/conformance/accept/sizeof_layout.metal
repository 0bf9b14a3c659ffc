// certain: static_assert of Metal layouts (MSL specification 2.2, vectors)
#include <metal_stdlib>
using namespace metal;
static_assert(sizeof(float3) == 16 && sizeof(packed_float3) == 12 && alignof(half4) == 8 &&
                  sizeof(bool4) == 4 && sizeof(long) == 8 && sizeof(char) == 1 && sizeof(size_t) == 8 &&
                  sizeof(ptrdiff_t) == 8 && alignof(packed_half4) == 2,
              "layout");
static_assert(is_same<size_t, ulong>::value || sizeof(size_t) == 8, "size_t");
kernel void k(device float* o [[buffer(0)]]) {
  o[0] = INFINITY + FLT_MAX + M_PI_F + HALF_MAX + numeric_limits<half>::max() + NAN + INT_MAX + UINT_MAX +
         MAXFLOAT;
}
