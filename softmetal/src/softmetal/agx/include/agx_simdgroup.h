// <metal_simdgroup>, <metal_compute>: operations that take the GPU one instruction, or a few.
#pragma once
#pragma clang system_header

#define AGX_CROSS_LANE __attribute__((const, convergent))
extern "C" {
uint nir_shuffle_xor(uint, uint) AGX_CROSS_LANE;
uint nir_shuffle(uint, uint) AGX_CROSS_LANE;
uint nir_shuffle_up(uint, uint) AGX_CROSS_LANE;
uint nir_shuffle_down(uint, uint) AGX_CROSS_LANE;
uint nir_ballot(bool) AGX_CROSS_LANE;
bool nir_vote_any(bool) AGX_CROSS_LANE;
bool nir_vote_all(bool) AGX_CROSS_LANE;
}
void __spirv_ControlBarrier(uint, uint, uint) __attribute__((convergent));
float __spirv_GroupNonUniformFAdd(uint, uint, float) AGX_CROSS_LANE;
float __spirv_GroupNonUniformFMax(uint, uint, float) AGX_CROSS_LANE;
float __spirv_GroupNonUniformFMin(uint, uint, float) AGX_CROSS_LANE;
int __spirv_GroupNonUniformIAdd(uint, uint, int) AGX_CROSS_LANE;
int __spirv_GroupNonUniformSMax(uint, uint, int) AGX_CROSS_LANE;
int __spirv_GroupNonUniformSMin(uint, uint, int) AGX_CROSS_LANE;
uint __spirv_GroupNonUniformBitwiseOr(uint, uint, uint) AGX_CROSS_LANE;
uint __spirv_GroupNonUniformBitwiseAnd(uint, uint, uint) AGX_CROSS_LANE;

namespace softmetal {
template <class T>
SOFTMETAL_INLINE T moved(T value, uint index, uint (*operation)(uint, uint)) {
  if constexpr (__is_same(T, bool)) {
    return operation(value, index) != 0;
  } else if constexpr (sizeof(T) == 2) {
    return __builtin_bit_cast(T, (ushort)operation(__builtin_bit_cast(ushort, value), index));
  } else if constexpr (sizeof(T) == 4) {
    return __builtin_bit_cast(T, operation(__builtin_bit_cast(uint, value), index));
  } else {
    static_assert(sizeof(T) % 4 == 0, "shuffles move 16 bits or words");
    struct Words {
      uint word[sizeof(T) / 4];
    } words = __builtin_bit_cast(Words, value);
    for (uint& word : words.word) word = operation(word, index);
    return __builtin_bit_cast(T, words);
  }
}
}  // namespace softmetal

namespace metal {
// Scope workgroup; acquire and release of threadgroup memory (0x100) and device memory (0x200).
SOFTMETAL_INLINE void threadgroup_barrier(mem_flags flags) {
  __spirv_ControlBarrier(2, 2, 8 | ((int)flags & 1 ? 0x200 : 0) | ((int)flags & 2 ? 0x100 : 0));
}
// The lanes of a simdgroup run in lockstep: no instruction.
SOFTMETAL_INLINE void simdgroup_barrier(mem_flags) {}

#define AGX_SHUFFLE(NAME, INSTRUCTION)                  \
  template <class T>                                    \
  SOFTMETAL_INLINE T NAME(T value, ushort index) {      \
    return softmetal::moved(value, index, INSTRUCTION); \
  }
AGX_SHUFFLE(simd_shuffle, nir_shuffle)
AGX_SHUFFLE(simd_broadcast, nir_shuffle)
AGX_SHUFFLE(simd_shuffle_xor, nir_shuffle_xor)
AGX_SHUFFLE(simd_shuffle_up, nir_shuffle_up)
AGX_SHUFFLE(simd_shuffle_down, nir_shuffle_down)
#undef AGX_SHUFFLE
template <class T>
SOFTMETAL_INLINE T simd_broadcast_first(T value) {
  return simd_broadcast(value, 0);
}

#define AGX_REDUCE(NAME, T, INSTRUCTION) \
  SOFTMETAL_INLINE T NAME(T x) { return (T)INSTRUCTION(3, 0, x); }
AGX_REDUCE(simd_sum, float, __spirv_GroupNonUniformFAdd)
AGX_REDUCE(simd_max, float, __spirv_GroupNonUniformFMax)
AGX_REDUCE(simd_min, float, __spirv_GroupNonUniformFMin)
AGX_REDUCE(simd_sum, half, __spirv_GroupNonUniformFAdd)
AGX_REDUCE(simd_max, half, __spirv_GroupNonUniformFMax)
AGX_REDUCE(simd_sum, int, __spirv_GroupNonUniformIAdd)
AGX_REDUCE(simd_sum, uint, __spirv_GroupNonUniformIAdd)
AGX_REDUCE(simd_max, int, __spirv_GroupNonUniformSMax)
AGX_REDUCE(simd_min, int, __spirv_GroupNonUniformSMin)
AGX_REDUCE(simd_or, uint, __spirv_GroupNonUniformBitwiseOr)
AGX_REDUCE(simd_and, uint, __spirv_GroupNonUniformBitwiseAnd)
#undef AGX_REDUCE
SOFTMETAL_INLINE int simd_prefix_inclusive_sum(int x) { return __spirv_GroupNonUniformIAdd(3, 1, x); }

struct simd_vote {
  using vote_t = ulong;
  vote_t bits;
  explicit operator vote_t() const { return bits; }
  bool any() const { return bits != 0; }
};
SOFTMETAL_INLINE simd_vote simd_ballot(bool x) { return simd_vote{(ulong)nir_ballot(x)}; }
SOFTMETAL_INLINE bool simd_any(bool x) { return nir_vote_any(x); }
SOFTMETAL_INLINE bool simd_all(bool x) { return nir_vote_all(x); }
}  // namespace metal
