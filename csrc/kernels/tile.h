// 8x8 simdgroup fragments, fed in contiguous runs.
//
// A lane of a simdgroup holds two neighbouring elements of an 8x8 matrix: (row, 2 * pair) and (row, 2 * pair
// + 1). A product Q K^T sums over the head dimension, so any order of that dimension will do as long as Q and
// K agree; and the columns of P V may come in any order as long as the store undoes it. We choose the orders
// that make what a lane needs from one row of Q, K or V *contiguous*: it is read as wide vectors, straight
// from wherever the row lives, with no transposed copy:
//
//   operand            lane reads                                   fragment f takes
//   Q (A of Q K^T)     row r,        [pair * D/4, +D/4)             run[f], run[D/8 + f]
//   K (B of Q K^T)     keys 2p, 2p+1, [row * D/8, +D/8)             first[f], second[f]
//   V (B of P V)       key `row`,    [pair * Dv/4, +Dv/4)           run[2f], run[2f + 1]
//   O (D of P V)       row r,        [pair * Dv/4, +Dv/4)           run[2f], run[2f + 1]
//
// That the lane layout is this one is not in Apple's specification; MLX, torch and tinygrad rely on it since
// M1.
#pragma once

#include <metal_simdgroup_matrix>

#include "config.h"

namespace fattn {

struct LanePosition {
  ushort row;   // 0..7
  ushort pair;  // 0..3: columns 2 * pair and 2 * pair + 1
};

inline LanePosition lane_position(ushort lane) {
  LanePosition at;
  at.row = ((lane >> 2) & 4) | ((lane >> 1) & 3);
  at.pair = ((lane >> 2) & 2) | (lane & 1);
  return at;
}

inline ushort lane_at(ushort row, ushort pair) {
  return ((row & 4) << 2) | ((pair & 2) << 2) | ((row & 3) << 1) | (pair & 1);
}

// The four lanes that share a row differ in bits 0 and 3 of the lane number.
inline float row_max_of(float x) {
  x = fmax(x, simd_shuffle_xor(x, ushort(1)));
  return fmax(x, simd_shuffle_xor(x, ushort(8)));
}

inline float row_sum_of(float x) {
  x += simd_shuffle_xor(x, ushort(1));
  return x + simd_shuffle_xor(x, ushort(8));
}

inline void set_elements(thread simdgroup_float8x8& fragment, float first, float second) {
  fragment.thread_elements()[0] = first;
  fragment.thread_elements()[1] = second;
}

// Reads N contiguous elements, widened to float. `aligned` says that `source` starts on a 4-element boundary
// of its row and that rows do so in memory; it is a compile-time constant at every call.
template <int N, typename Pointer>
inline void read_scalars(Pointer source, thread float (&run)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) {
    run[i] = float(source[i]);
  }
}

#define FATTN_DEFINE_READ_RUN(SPACE)                                                          \
  template <int N>                                                                            \
  inline void read_run(const SPACE Element* source, bool aligned, thread float(&run)[N]) {    \
    if (aligned && N % 4 == 0) {                                                              \
      _Pragma("unroll") for (int i = 0; i + 3 < N; i += 4) {                                  \
        const float4 v = float4(*reinterpret_cast<const SPACE vec<Element, 4>*>(source + i)); \
        run[i] = v[0];                                                                        \
        run[i + 1] = v[1];                                                                    \
        run[i + 2] = v[2];                                                                    \
        run[i + 3] = v[3];                                                                    \
      }                                                                                       \
    } else if (aligned && N % 2 == 0) {                                                       \
      _Pragma("unroll") for (int i = 0; i + 1 < N; i += 2) {                                  \
        const float2 v = float2(*reinterpret_cast<const SPACE vec<Element, 2>*>(source + i)); \
        run[i] = v[0];                                                                        \
        run[i + 1] = v[1];                                                                    \
      }                                                                                       \
    } else {                                                                                  \
      read_scalars<N>(source, run);                                                           \
    }                                                                                         \
  }
FATTN_DEFINE_READ_RUN(device)
FATTN_DEFINE_READ_RUN(threadgroup)
#undef FATTN_DEFINE_READ_RUN

template <int N>
inline void fill_run(thread float (&run)[N], float value) {
#pragma unroll
  for (int i = 0; i < N; i++) {
    run[i] = value;
  }
}

// Becomes (and stays) NaN as soon as an element is infinite or NaN; stays 0 otherwise. One FMA per element.
template <int N>
inline float special_values(thread const float (&run)[N], float seen) {
#pragma unroll
  for (int i = 0; i < N; i++) {
    seen = fma(run[i], 0.0f, seen);
  }
  return seen;
}

}  // namespace fattn
