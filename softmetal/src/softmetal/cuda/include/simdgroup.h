// A simdgroup is a warp. The number that Metal gives a lane is a permutation of its CUDA number, chosen so
// that the layout of an 8x8 simdgroup matrix is the layout of a tensor-core fragment (simdgroup_matrix.h):
// bits (4 3 2 1 0) of the Metal number are bits (4 1 3 2 0) of the CUDA number.
#pragma once

#include "functions.h"

namespace softmetal {

constexpr uint kAllLanes = 0xffffffffu;

SOFTMETAL_INLINE constexpr uint metal_lane(uint cuda_lane) {
  return (cuda_lane & 0x11) | ((cuda_lane & 2) << 2) | ((cuda_lane >> 1) & 6);
}
SOFTMETAL_INLINE constexpr uint cuda_lane(uint metal_lane) {
  return (metal_lane & 0x11) | ((metal_lane >> 2) & 2) | ((metal_lane & 6) << 1);
}
SOFTMETAL_INLINE uint own_cuda_lane() {
  uint lane;
  asm("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}
SOFTMETAL_INLINE uint own_metal_lane() { return metal_lane(own_cuda_lane()); }

// Moves values of up to 8 bytes with one or two 32-bit shuffles.
template <typename T, typename Shuffle>
SOFTMETAL_INLINE T shuffled(T value, Shuffle shuffle) {
  static_assert(sizeof(T) <= 8 || sizeof(T) % 4 == 0, "this type cannot be shuffled");
  if constexpr (sizeof(T) <= 4) {
    uint word = 0;
    __builtin_memcpy(&word, &value, sizeof(T));
    word = shuffle(word);
    __builtin_memcpy(&value, &word, sizeof(T));
  } else {
    uint words[sizeof(T) / 4];
    __builtin_memcpy(words, &value, sizeof(T));
#pragma unroll
    for (uint& word : words) word = shuffle(word);
    __builtin_memcpy(&value, words, sizeof(T));
  }
  return value;
}

struct ShuffleFrom {
  uint lane;  // CUDA number
  SOFTMETAL_INLINE uint operator()(uint word) const { return __shfl_sync(kAllLanes, word, lane); }
};
struct ShuffleXor {
  uint mask;  // by CUDA number
  SOFTMETAL_INLINE uint operator()(uint word) const { return __shfl_xor_sync(kAllLanes, word, mask); }
};

}  // namespace softmetal

namespace metal {

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
SOFTMETAL_INLINE constexpr mem_flags operator|(mem_flags a, mem_flags b) {
  return mem_flags(int(a) | int(b));
}

SOFTMETAL_INLINE void threadgroup_barrier(mem_flags) { __syncthreads(); }

// mem_none orders no memory, and a warp runs in lockstep: no instruction.
SOFTMETAL_INLINE void simdgroup_barrier(mem_flags flags) {
  if (flags != mem_flags::mem_none) __syncwarp();
}

template <typename T>
SOFTMETAL_INLINE T simd_shuffle(T value, ushort lane) {
  return softmetal::shuffled(value, softmetal::ShuffleFrom{softmetal::cuda_lane(lane)});
}
template <typename T>
SOFTMETAL_INLINE T simd_shuffle_xor(T value, ushort mask) {
  return softmetal::shuffled(value, softmetal::ShuffleXor{softmetal::cuda_lane(mask)});
}
template <typename T>
SOFTMETAL_INLINE T simd_shuffle_down(T value, ushort delta) {
  const uint source = softmetal::own_metal_lane() + delta;
  return simd_shuffle(value, ushort(source < 32 ? source : source - delta));
}
template <typename T>
SOFTMETAL_INLINE T simd_shuffle_up(T value, ushort delta) {
  const uint lane = softmetal::own_metal_lane();
  return simd_shuffle(value, ushort(lane >= delta ? lane - delta : lane));
}
template <typename T>
SOFTMETAL_INLINE T simd_prefix_inclusive_sum(T value) {
  _Pragma("unroll") for (int delta = 1; delta < 32; delta <<= 1) {
    const T before = simd_shuffle_up(value, ushort(delta));
    if (softmetal::own_metal_lane() >= uint(delta)) value = T(value + before);
  }
  return value;
}
template <typename T>
SOFTMETAL_INLINE T simd_broadcast(T value, ushort lane) {
  return simd_shuffle(value, lane);
}
template <typename T>
SOFTMETAL_INLINE T simd_broadcast_first(T value) {
  return simd_shuffle(value, 0);
}

#define SOFTMETAL_REDUCTION(name, combined)                                  \
  template <typename T>                                                      \
  SOFTMETAL_INLINE T name(T a) {                                             \
    _Pragma("unroll") for (int mask = 16; mask > 0; mask >>= 1) {            \
      const T b = softmetal::shuffled(a, softmetal::ShuffleXor{uint(mask)}); \
      a = combined;                                                          \
    }                                                                        \
    return a;                                                                \
  }
SOFTMETAL_REDUCTION(simd_sum, T(a + b))
SOFTMETAL_REDUCTION(simd_product, T(a* b))
SOFTMETAL_REDUCTION(simd_max, metal::max(a, b))
SOFTMETAL_REDUCTION(simd_min, metal::min(a, b))
SOFTMETAL_REDUCTION(simd_and, T(a& b))
SOFTMETAL_REDUCTION(simd_or, T(a | b))
SOFTMETAL_REDUCTION(simd_xor, T(a ^ b))
#undef SOFTMETAL_REDUCTION

SOFTMETAL_INLINE bool simd_any(bool condition) { return __any_sync(softmetal::kAllLanes, condition); }
SOFTMETAL_INLINE bool simd_all(bool condition) { return __all_sync(softmetal::kAllLanes, condition); }

struct simd_vote {
  using vote_t = ulong;
  vote_t votes;
  SOFTMETAL_INLINE explicit constexpr simd_vote(vote_t v = 0) : votes(v) {}
  SOFTMETAL_INLINE explicit constexpr operator vote_t() const { return votes; }
};
// A sum, because Metal's order of the lanes is not CUDA's.
SOFTMETAL_INLINE simd_vote simd_ballot(bool vote) {
  return simd_vote(simd_sum(vote ? 1u << softmetal::own_metal_lane() : 0u));
}

}  // namespace metal
