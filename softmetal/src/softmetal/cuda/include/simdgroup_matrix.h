// 8x8 simdgroup matrices on tensor cores. A lane of row r and pair p (simdgroup.h) holds elements (r, 2p) and
// (r, 2p + 1). This is also the layout of A, C and D in the lower eight rows of mma.m16n8k8, if the order of
// the summed dimension is 0 2 4 6 1 3 5 7. The upper eight rows are computed from arbitrary registers and
// dropped. Only B has to be transposed between lanes.
//
// Two operands of one 16-bit type are multiplied in that type, operands of two types in tf32, where both are
// exact; products are summed in float32. float32 operands are split into two tf32 parts each (three
// instructions). If SOFTMETAL_WIDENED_FROM names the 16-bit type that B was widened from, as in a 16-bit
// model, lanes exchange B in 16 bits, and A, which may be any float32, is rounded to tf32.
#pragma once

#include "simdgroup.h"
// Need the names of simdgroup.h.
#include "../../msl/common/fragment.h"
#include "../../msl/common/line.h"

namespace softmetal {

struct Pair {
  uint first, second;
};

// Pure functions of their arguments in all lanes: not volatile, so an operand that is used twice is
// transposed once.
SOFTMETAL_INLINE uint shuffle_word(uint word, uint lane) {
  uint result;
  asm("shfl.sync.idx.b32 %0, %1, %2, 31, 0xffffffff;" : "=r"(result) : "r"(word), "r"(lane));
  return result;
}

// Lane (r, p) holds B[r][2p] and B[r][2p + 1] and gets B[2p][r] and B[2p + 1][r]. Each lane sends and
// receives two words, with different partners; two shuffles suffice if even and odd rows send their words in
// opposite order.
SOFTMETAL_INLINE Pair transposed(Pair own) {
  const uint lane = own_cuda_lane();
  const bool odd_row = lane & 4;
  // Rows 2p and 2p + 1 hold this lane's elements in their pair r / 2: in its first word if r is even.
  const uint even_source = (lane & 3) * 8 + (lane >> 3);
  const uint one = odd_row ? own.second : own.first;
  const uint other = odd_row ? own.first : own.second;
  const uint from_one = shuffle_word(one, even_source + (odd_row ? 4 : 0));
  const uint from_other = shuffle_word(other, even_source + (odd_row ? 0 : 4));
  return {odd_row ? from_other : from_one, odd_row ? from_one : from_other};
}

SOFTMETAL_INLINE uint to_tf32(float x) {
  uint bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
  return bits;
}

struct Accumulator {
  float first, second;
};

SOFTMETAL_INLINE Accumulator multiply_tf32(Pair a, Pair b, Accumulator c) {
  Accumulator d;
  asm("{\n"
      ".reg .b32 a1, a3;\n"
      ".reg .f32 c2, c3, d2, d3;\n"
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
      "{%0, %1, d2, d3}, {%2, a1, %3, a3}, {%4, %5}, {%6, %7, c2, c3};\n"
      "}"
      : "=f"(d.first), "=f"(d.second)
      : "r"(a.first), "r"(a.second), "r"(b.first), "r"(b.second), "f"(c.first), "f"(c.second));
  return d;
}

// A and B as two elements in a word each, B transposed.
SOFTMETAL_INLINE Accumulator multiply_short(uint a, uint b, Accumulator c, half) {
  Accumulator d;
  asm("{\n"
      ".reg .b32 a1;\n"
      ".reg .f32 c2, c3, d2, d3;\n"
      "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, d2, d3}, {%2, a1}, {%3}, {%4, %5, c2, c3};\n"
      "}"
      : "=f"(d.first), "=f"(d.second)
      : "r"(a), "r"(b), "f"(c.first), "f"(c.second));
  return d;
}
SOFTMETAL_INLINE Accumulator multiply_short(uint a, uint b, Accumulator c, bfloat) {
  Accumulator d;
  asm("{\n"
      ".reg .b32 a1;\n"
      ".reg .f32 c2, c3, d2, d3;\n"
      "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, d2, d3}, {%2, a1}, {%3}, {%4, %5, c2, "
      "c3};\n"
      "}"
      : "=f"(d.first), "=f"(d.second)
      : "r"(a), "r"(b), "f"(c.first), "f"(c.second));
  return d;
}

SOFTMETAL_INLINE Pair float_pair(float first, float second) {
  return {float_bits(first), float_bits(second)};
}

// Two elements of 16 bits in a word.
SOFTMETAL_INLINE uint packed(float first, float second, half) {
  uint word;
  asm("cvt.rn.f16x2.f32 %0, %2, %1;" : "=r"(word) : "f"(first), "f"(second));
  return word;
}
SOFTMETAL_INLINE uint packed(float first, float second, bfloat) {
  uint word;
  asm("prmt.b32 %0, %1, %2, 0x7632;" : "=r"(word) : "f"(first), "f"(second));
  return word;
}

SOFTMETAL_INLINE uint transposed_word(uint word) {
  uint column;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(column) : "r"(word));
  return column;
}

template <typename T>
SOFTMETAL_INLINE uint short_word(T first, T second) {
  return as_type<ushort>(first) | uint(as_type<ushort>(second)) << 16;
}

template <typename T>
SOFTMETAL_INLINE Pair transposed_short(uint word) {
  const uint column = transposed_word(word);
  return float_pair(float(as_type<T>(ushort(column))), float(as_type<T>(ushort(column >> 16))));
}

#ifdef SOFTMETAL_WIDENED_FROM
typedef SOFTMETAL_WIDENED_FROM WidenedFrom;
#else
typedef float WidenedFrom;
#endif
constexpr bool kSplitFloats = std::is_same_v<WidenedFrom, float>;

template <typename T>
SOFTMETAL_INLINE Pair transposed_operand(T first, T second) {
  if constexpr (sizeof(T) == 2) {
    return transposed_short<T>(short_word(first, second));
  } else if constexpr (kSplitFloats) {
    return transposed(float_pair(first, second));
  } else {
    return transposed_short<WidenedFrom>(packed(first, second, WidenedFrom()));
  }
}

struct Split {
  Pair high, low;
};

SOFTMETAL_INLINE Split split(Pair x) {
  const float first = __builtin_bit_cast(float, x.first);
  const float second = __builtin_bit_cast(float, x.second);
  const Pair high{to_tf32(first), to_tf32(second)};
  return {high, Pair{to_tf32(first - __builtin_bit_cast(float, high.first)),
                     to_tf32(second - __builtin_bit_cast(float, high.second))}};
}

SOFTMETAL_INLINE Fragment fragment() { return {own_cuda_lane() >> 2, (own_cuda_lane() & 3) * 2}; }

template <typename T>
using ThreadElements = metal::vec<T, 2>;

template <typename D, typename A, typename B, typename C>
SOFTMETAL_INLINE ThreadElements<D> multiply_operation(metal::vec<A, 2> a, metal::vec<B, 2> b,
                                                      metal::vec<C, 2> c, Line) {
  Accumulator sum{float(c.x), float(c.y)};
  if constexpr (sizeof(A) == 2 && std::is_same_v<A, B>) {
    sum = multiply_short(short_word(a.x, a.y), transposed_word(short_word(b.x, b.y)), sum, A());
    return ThreadElements<D>(sum.first, sum.second);
  }
  const Pair left = float_pair(float(a.x), float(a.y));
  const Pair right = transposed_operand(b.x, b.y);
  if constexpr (sizeof(A) == 2 && sizeof(B) == 2) {
    sum = multiply_tf32(left, right, sum);
  } else if constexpr (kSplitFloats) {
    const Split l = split(left);
    const Split r = split(right);
    sum = multiply_tf32(l.low, r.high, sum);
    sum = multiply_tf32(l.high, r.low, sum);
    sum = multiply_tf32(l.high, r.high, sum);
  } else {
    sum = multiply_tf32({to_tf32(float(a.x)), to_tf32(float(a.y))}, right, sum);
  }
  return ThreadElements<D>(sum.first, sum.second);
}

}  // namespace softmetal

#include "../../msl/common/simdgroup_matrix.h"

namespace metal {

// If the caller promised aligned runs (runs.py), two neighbours in a row are one access.
template <typename T>
SOFTMETAL_INLINE void simdgroup_load(simdgroup_matrix<T, 8, 8>& matrix, const T* source,
                                     ulong elements_per_row = 8, ulong2 origin = ulong2(0, 0),
                                     bool transpose = false) {
  const auto [row, column] = softmetal::fragment();
  source += origin.y * elements_per_row + origin.x;
  if (transpose) {
    matrix.elements =
        vec<T, 2>(source[column * elements_per_row + row], source[(column + 1) * elements_per_row + row]);
  } else {
    source += row * elements_per_row + column;
#ifdef SOFTMETAL_ALIGNED_RUNS
    matrix.elements = *reinterpret_cast<const vec<T, 2>*>(source);
#else
    matrix.elements = vec<T, 2>(source[0], source[1]);
#endif
  }
}

template <typename T>
SOFTMETAL_INLINE void simdgroup_store(const simdgroup_matrix<T, 8, 8>& matrix, T* target,
                                      ulong elements_per_row = 8, ulong2 origin = ulong2(0, 0),
                                      bool transpose = false) {
  const auto [row, column] = softmetal::fragment();
  target += origin.y * elements_per_row + origin.x;
  if (transpose) {
    target[column * elements_per_row + row] = matrix.elements.x;
    target[(column + 1) * elements_per_row + row] = matrix.elements.y;
  } else {
    target += row * elements_per_row + column;
#ifdef SOFTMETAL_ALIGNED_RUNS
    *reinterpret_cast<vec<T, 2>*>(target) = matrix.elements;
#else
    target[0] = matrix.elements.x;
    target[1] = matrix.elements.y;
#endif
  }
}

}  // namespace metal
