// Products of tensor operations on tensor cores. A tile of a cooperative tensor consists of 16x16 fragments
// in the layout of an M5: the lane of group g and quad t (CUDA's lane / 4 and lane % 4: simdgroup.h) holds
// columns 4t to 4t + 3 of rows g and g + 8.
//
// One mma.m16n8k16 sums k = 2t, 2t + 1, 2t + 8, 2t + 9 in lane t. The order of k is free if it is the same
// for both operands: with k = 4t to 4t + 3 instead, a left operand has the layout of a fragment of A and
// needs no exchange between lanes. A lane's part of B is four k of one column n. The choice of n per lane
// determines the columns that a lane gets in C: tensor_product.h chooses n to match the layout.
#pragma once

#include "simdgroup_matrix.h"

namespace softmetal {

// Four neighbours in a row.
template <typename T>
struct Quad {
  T elements[4];
  SOFTMETAL_INLINE T& operator[](int i) { return elements[i]; }
  SOFTMETAL_INLINE const T& operator[](int i) const { return elements[i]; }
};

SOFTMETAL_INLINE uint lane_group() { return own_cuda_lane() >> 2; }
SOFTMETAL_INLINE uint lane_quad() { return own_cuda_lane() & 3; }

// Four sums of a lane, of rows g, g, g + 8, g + 8.
struct Sums {
  float& elements0;
  float& elements1;
  float& elements2;
  float& elements3;
};

SOFTMETAL_INLINE void multiply_16(Sums c, const uint (&a)[4], const uint (&b)[2], half) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c.elements0), "+f"(c.elements1), "+f"(c.elements2), "+f"(c.elements3)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
SOFTMETAL_INLINE void multiply_16(Sums c, const uint (&a)[4], const uint (&b)[2], bfloat) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c.elements0), "+f"(c.elements1), "+f"(c.elements2), "+f"(c.elements3)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
SOFTMETAL_INLINE void multiply_8(Sums c, const uint* a, const uint* b) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c.elements0), "+f"(c.elements1), "+f"(c.elements2), "+f"(c.elements3)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Two floats, rounded to bfloats in one instruction.
SOFTMETAL_INLINE uint rounded_pair(float first, float second) {
  uint word;
  asm("cvt.rn.bf16x2.f32 %0, %2, %1;" : "=r"(word) : "f"(first), "f"(second));
  return word;
}

// How a 16x8x16 product of elements A and B is computed. Operands of one 16-bit type are multiplied in that
// type. A float32 operand beside bfloat is split into bfloats: two, which have more bits than relaxed
// precision keeps, or three, which have all of them. Otherwise operands are tf32, in which 16-bit types are
// exact; float32 is rounded to tf32 if precision is relaxed, and split in two if not.
template <typename A, typename B, bool relaxed>
struct Multiplier {
  static constexpr bool kShort = Short<A> && std::is_same_v<A, B>;
  static constexpr bool kBfloats = std::is_same_v<A, float> && std::is_same_v<B, bfloat>;
  static constexpr int kWords = kShort || kBfloats ? 1 : 2;  // per two elements
  static constexpr int kLeftParts = !std::is_same_v<A, float> ? 1
                                    : kBfloats                ? (relaxed ? 2 : 3)
                                    : relaxed                 ? 1
                                                              : 2;
  static constexpr int kRightParts = std::is_same_v<B, float> && !relaxed ? 2 : 1;

  struct Left {
    uint words[kLeftParts][4 * kWords];
  };
  struct Right {
    uint words[kRightParts][2 * kWords];
  };

  SOFTMETAL_INLINE static Left left(const Quad<A>& upper, const Quad<A>& lower) {
    Left a;
    if constexpr (kShort) {
      pack(a.words[0], upper, lower);
    } else if constexpr (kBfloats) {
      Quad<float> rest[2] = {upper, lower};
#pragma unroll
      for (int part = 0; part < kLeftParts; ++part) {
#pragma unroll
        for (int word = 0; word < 4; ++word) {
          float& first = rest[word % 2][word / 2 * 2];
          float& second = rest[word % 2][word / 2 * 2 + 1];
          const uint both = rounded_pair(first, second);
          first -= __builtin_bit_cast(float, both << 16);
          second -= __builtin_bit_cast(float, both & 0xffff0000u);
          a.words[part][word] = both;
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        // A k8 step takes two elements of each row: words 0 and 2 belong to the upper row.
        const int word = i % 4 / 2 * 4 + i % 2 * 2 + i / 4;
        float x = float((i < 4 ? upper : lower)[i % 4]);
#pragma unroll
        for (int part = 0; part < kLeftParts; ++part) x = round_off(x, a.words[part][word], A());
      }
    }
    return a;
  }

  SOFTMETAL_INLINE static Right right(const Quad<B>& column) {
    Right b;
    if constexpr (kWords == 1) {
      b.words[0][0] = short_word(column[0], column[1]);
      b.words[0][1] = short_word(column[2], column[3]);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float x = float(column[i]);
#pragma unroll
        for (int part = 0; part < kRightParts; ++part) x = round_off(x, b.words[part][i], B());
      }
    }
    return b;
  }

  SOFTMETAL_INLINE static void accumulate(Sums c, const Left& a, const Right& b) {
    // The smallest terms first; low x low is below the precision.
#pragma unroll
    for (int i = kLeftParts - 1; i >= 0; --i) {
#pragma unroll
      for (int j = kRightParts - 1; j >= 0; --j) {
        if (i > 0 && j > 0) continue;
        if constexpr (kWords == 1) {
          multiply_16(c, a.words[i], b.words[j], B());
        } else {
          multiply_8(c, a.words[i], b.words[j]);
          multiply_8(c, a.words[i] + 4, b.words[j] + 2);
        }
      }
    }
  }

 private:
  template <typename T>
  SOFTMETAL_INLINE static void pack(uint (&words)[4 * kWords], const Quad<T>& upper, const Quad<T>& lower) {
    words[0] = short_word(upper[0], upper[1]);
    words[1] = short_word(lower[0], lower[1]);
    words[2] = short_word(upper[2], upper[3]);
    words[3] = short_word(lower[2], lower[3]);
  }
  // Returns the remainder of x after rounding.
  SOFTMETAL_INLINE static float round_off(float x, uint& word, float) {
    word = to_tf32(x);
    return x - __builtin_bit_cast(float, word);
  }
  template <Short T>
  SOFTMETAL_INLINE static float round_off(float x, uint& word, T) {
    word = float_bits(x);
    return 0.0f;
  }
};

// ---- exchanges between lanes, for operands that are cooperative tensors

// A quad as words of 32 bits, in which lanes exchange.
template <typename T>
struct QuadWords {
  static constexpr int kCount = sizeof(Quad<T>) / 4;
  uint words[kCount];

  SOFTMETAL_INLINE explicit QuadWords(const Quad<T>& quad) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if constexpr (sizeof(T) == 2) {
        words[i] = short_word(quad[2 * i], quad[2 * i + 1]);
      } else {
        words[i] = as_type<uint>(quad[i]);
      }
    }
  }
  QuadWords() = default;
  SOFTMETAL_INLINE Quad<T> quad() const {
    Quad<T> result;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (sizeof(T) == 2) {
        result[i] = as_type<T>(ushort(words[i / 2] >> (i % 2 * 16)));
      } else {
        result[i] = as_type<T>(words[i]);
      }
    }
    return result;
  }
};

// Rows g and g + 8 (lower) become rows r = 4(g / 2) + g % 2 and r + 2 (lower). Each lane sends and receives
// two rows, with different partners.
template <typename T>
SOFTMETAL_INLINE void exchange_rows(Quad<T>& upper, Quad<T>& lower) {
  const uint g = lane_group();
  const uint first = (g & 2) << 1 | (g & 1);  // the group that holds the new upper row
  const bool is_low = g < 4, sends_lower_first = g & 2;
  const uint one_source = (is_low ? first : first + 2) * 4 + lane_quad();
  const uint other_source = (is_low ? first + 2 : first) * 4 + lane_quad();
  QuadWords<T> rows[2] = {QuadWords<T>(upper), QuadWords<T>(lower)};
#pragma unroll
  for (int i = 0; i < QuadWords<T>::kCount; ++i) {
    uint &high = rows[0].words[i], &low = rows[1].words[i];
    const uint one = shuffle_word(sends_lower_first ? low : high, one_source);
    const uint other = shuffle_word(sends_lower_first ? high : low, other_source);
    high = is_low ? one : other;
    low = is_low ? other : one;
  }
  upper = rows[0].quad();
  lower = rows[1].quad();
}

// Columns 4t to 4t + 3 become columns 2t, 2t + 1, 2t + 8, 2t + 9: pairs 2t and 2t + 1 become t and t + 4.
template <typename T>
SOFTMETAL_INLINE Quad<T> exchange_columns(const Quad<T>& own) {
  const uint t = lane_quad(), base = own_cuda_lane() & ~3u;
  const bool sends_first = t < 2, is_odd = t & 1;
  const uint one_source = base + t / 2 + (is_odd ? 2 : 0), other_source = base + t / 2 + (is_odd ? 0 : 2);
  QuadWords<T> pairs(own);
  constexpr int kWords = QuadWords<T>::kCount / 2;  // of a pair
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    uint &first = pairs.words[i], &second = pairs.words[i + kWords];
    const uint one = shuffle_word(sends_first ? first : second, one_source);
    const uint other = shuffle_word(sends_first ? second : first, other_source);
    first = is_odd ? other : one;
    second = is_odd ? one : other;
  }
  return pairs.quad();
}

// Columns n = 4(g / 2) + g % 2 and n + 2 of a fragment of B whose rows are k: rows 2t, 2t + 1, 2t + 8 and
// 2t + 9 of each.
template <typename T>
SOFTMETAL_INLINE void transpose_fragment(const Quad<T>& upper, const Quad<T>& lower, Quad<T> (&columns)[2]) {
#pragma unroll
  for (int c = 0; c < 2; ++c) {
#pragma unroll
    for (int half_ = 0; half_ < 2; ++half_) {
      const Quad<T>& row = half_ ? lower : upper;
      const T first = row[2 * c], second = row[2 * c + 1];
      if constexpr (sizeof(T) == 2) {
        const uint word = transposed_word(short_word(first, second));
        columns[c][2 * half_] = as_type<T>(ushort(word));
        columns[c][2 * half_ + 1] = as_type<T>(ushort(word >> 16));
      } else {
        const uint x = as_type<uint>(first), y = as_type<uint>(second);
        const uint low = transposed_word((x & 0xffffu) | y << 16);
        const uint high = transposed_word(x >> 16 | (y & 0xffff0000u));
        columns[c][2 * half_] = as_type<T>((low & 0xffffu) | high << 16);
        columns[c][2 * half_ + 1] = as_type<T>(low >> 16 | (high & 0xffff0000u));
      }
    }
  }
}

}  // namespace softmetal
