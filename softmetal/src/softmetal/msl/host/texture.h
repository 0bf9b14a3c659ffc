// <metal_texture>, <metal_visible_function_table>: names only. Kernels that take textures, samplers or
// function tables compile, which keeps the rest of their library usable; their pipelines are refused.
#pragma once
#pragma clang system_header
#include "vectors.h"

namespace metal {
enum class access { sample, read, write, read_write };
enum class coord { normalized, pixel };
enum class address { clamp_to_zero, clamp_to_edge, repeat, mirrored_repeat, clamp_to_border };
enum class s_address { clamp_to_zero, clamp_to_edge, repeat, mirrored_repeat, clamp_to_border };
enum class t_address { clamp_to_zero, clamp_to_edge, repeat, mirrored_repeat, clamp_to_border };
enum class r_address { clamp_to_zero, clamp_to_edge, repeat, mirrored_repeat, clamp_to_border };
enum class border_color { transparent_black, opaque_black, opaque_white };
enum class filter { nearest, linear, bicubic };
enum class mag_filter { nearest, linear, bicubic };
enum class min_filter { nearest, linear, bicubic };
enum class mip_filter { none, nearest, linear };
enum class compare_func { none, never, less, less_equal, greater, greater_equal, equal, not_equal, always };
enum class component { x, y, z, w };

struct sampler {
  sampler() = default;
  template <class First, class... Rest>
  SOFTMETAL_INLINE constexpr sampler(First, Rest...) {}
};
#define SOFTMETAL_SAMPLER_OPTION(NAME)                \
  struct NAME {                                       \
    template <class... A>                             \
    SOFTMETAL_INLINE explicit constexpr NAME(A...) {} \
  };
SOFTMETAL_SAMPLER_OPTION(max_anisotropy)
SOFTMETAL_SAMPLER_OPTION(lod_clamp)
SOFTMETAL_SAMPLER_OPTION(bias)
SOFTMETAL_SAMPLER_OPTION(level)
SOFTMETAL_SAMPLER_OPTION(gradient2d)
SOFTMETAL_SAMPLER_OPTION(gradient3d)
SOFTMETAL_SAMPLER_OPTION(gradientcube)
SOFTMETAL_SAMPLER_OPTION(min_lod_clamp)
#undef SOFTMETAL_SAMPLER_OPTION
}  // namespace metal

namespace softmetal {
template <class T, int N>
struct texture_value {
  using type = vec<T, N>;
};
template <class T>
struct texture_value<T, 1> {
  using type = T;
};
template <class T, int N>
using value_of = typename texture_value<T, N>::type;

// The base of types that a host binds. No object of one is ever used, because pipelines of kernels that take
// one are refused.
struct Handle {};

template <class Value>
struct Texture : Handle {
#define SOFTMETAL_TEXTURE_METHOD(RESULT, NAME) \
  template <class... A>                        \
  SOFTMETAL_INLINE RESULT NAME(A...) const {   \
    __builtin_trap();                          \
  }
  SOFTMETAL_TEXTURE_METHOD(Value, sample)
  SOFTMETAL_TEXTURE_METHOD(Value, read)
  SOFTMETAL_TEXTURE_METHOD(void, write)
  SOFTMETAL_TEXTURE_METHOD(void, fence)
  SOFTMETAL_TEXTURE_METHOD(Value, gather)
  SOFTMETAL_TEXTURE_METHOD(element_of<Value>, sample_compare)
  SOFTMETAL_TEXTURE_METHOD(uint, get_width)
  SOFTMETAL_TEXTURE_METHOD(uint, get_height)
  SOFTMETAL_TEXTURE_METHOD(uint, get_depth)
  SOFTMETAL_TEXTURE_METHOD(uint, get_array_size)
  SOFTMETAL_TEXTURE_METHOD(uint, get_num_mip_levels)
  SOFTMETAL_TEXTURE_METHOD(uint, get_num_samples)
#undef SOFTMETAL_TEXTURE_METHOD
};
}  // namespace softmetal

namespace metal {
#define SOFTMETAL_TEXTURE(NAME, SIZE)           \
  template <class T, access A = access::sample> \
  struct NAME : softmetal::Texture<softmetal::value_of<T, SIZE>> {};
SOFTMETAL_TEXTURE(texture1d, 4)
SOFTMETAL_TEXTURE(texture1d_array, 4)
SOFTMETAL_TEXTURE(texture2d, 4)
SOFTMETAL_TEXTURE(texture2d_array, 4)
SOFTMETAL_TEXTURE(texture2d_ms, 4)
SOFTMETAL_TEXTURE(texture2d_ms_array, 4)
SOFTMETAL_TEXTURE(texture3d, 4)
SOFTMETAL_TEXTURE(texturecube, 4)
SOFTMETAL_TEXTURE(texturecube_array, 4)
SOFTMETAL_TEXTURE(texture_buffer, 4)
SOFTMETAL_TEXTURE(depth2d, 1)
SOFTMETAL_TEXTURE(depth2d_array, 1)
SOFTMETAL_TEXTURE(depth2d_ms, 1)
SOFTMETAL_TEXTURE(depth2d_ms_array, 1)
SOFTMETAL_TEXTURE(depthcube, 1)
SOFTMETAL_TEXTURE(depthcube_array, 1)
#undef SOFTMETAL_TEXTURE
template <class T>
SOFTMETAL_INLINE bool is_null_texture(const softmetal::Texture<T>&) {
  __builtin_trap();
}

template <class Signature>
struct visible_function_table : softmetal::Handle {
  SOFTMETAL_INLINE Signature* operator[](uint) const { __builtin_trap(); }
  SOFTMETAL_INLINE uint size() const { __builtin_trap(); }
  SOFTMETAL_INLINE bool empty() const { __builtin_trap(); }
};
template <class Signature>
SOFTMETAL_INLINE bool is_null_visible_function_table(visible_function_table<Signature>) {
  __builtin_trap();
}
}  // namespace metal
