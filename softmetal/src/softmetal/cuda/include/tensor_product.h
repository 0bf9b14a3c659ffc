// The product of tensor operations: operands in memory or in cooperative tensors, as fragments of
// mma.m16n8k16. Operands in memory and left operands in the layout of an M5 need no exchange between lanes: a
// lane loads its part of the fragments, with vector loads if rows are aligned (the promise in runs.py). A
// right operand in a cooperative tensor is exchanged, as fragments of B have another layout.
#pragma once

#include "cooperative_tensor.h"

namespace softmetal {

// `steps` quads of neighbours in a row, from `column`.
template <bool whole, int steps, typename Tensor, typename T>
SOFTMETAL_INLINE void load_row(const Tensor& tensor, int row, int column, Quad<T> (&quads)[steps]) {
  const T* place = tensor.data + row * tensor.strides[1] + column;
  if constexpr (whole && kAlignedRuns && sizeof(quads) == 16) {
    const uint4 words = load_words(reinterpret_cast<const uint4*>(place));
    __builtin_memcpy(quads, &words, 16);
  } else if constexpr (whole && kAlignedRuns && sizeof(quads) == 8) {
    const uint2 words = load_words(reinterpret_cast<const uint2*>(place));
    __builtin_memcpy(quads, &words, 8);
  } else {
#pragma unroll
    for (int i = 0; i < 4 * steps; ++i) {
      const bool is_inside = whole || (row < tensor.sizes[1] && column + i < tensor.sizes[0]);
      quads[i / 4][i % 4] = is_inside ? place[i] : T(0);
    }
  }
}

template <bool whole, typename Tensor>
SOFTMETAL_INLINE auto load_element(const Tensor& tensor, int row, int column) {
  typedef typename Tensor::value_type T;
  if (!whole && (row >= tensor.sizes[1] || column >= tensor.sizes[0])) return T(0);
  return tensor.data[row * tensor.strides[1] + column];
}

template <unsigned long number, typename L, typename R, typename O>
struct MatrixProduct {
  using Descriptor = mpp::tensor_ops::matmul2d_descriptor;
  static constexpr Descriptor D{DescriptorNumber{number}};
  typedef typename L::value_type A;
  typedef typename R::value_type B;
  typedef Multiplier<A, B, D.relaxed_precision> Multiply;
  static constexpr int M = D.m, N = D.n, K = D.k;
  static constexpr bool kLeftHeld = is_cooperative_v<L>, kRightHeld = is_cooperative_v<R>,
                        kOutHeld = is_cooperative_v<O>;
  static_assert(M % 16 == 0 && N % 16 == 0 && K % 16 == 0, "M, N and K are multiples of 16 here");
  static_assert(!(kLeftHeld && D.transpose_left), "a cooperative left operand is not transposed here");
  // Summed elements of a lane in a step of 16: 2t, 2t + 1, 2t + 8 and 2t + 9, else 4t to 4t + 3; of two steps
  // together, 8t to 8t + 7.
  static constexpr bool kPairs = kRightHeld && !D.transpose_right;
  static constexpr bool kWide = !kLeftHeld && !kRightHeld && !D.transpose_left && D.transpose_right &&
                                sizeof(A) == 2 && sizeof(B) == 2 && K % 32 == 0 && K > 0;
  static constexpr int kSteps = kWide ? 2 : 1;
  // Columns of a block, in tiles of 8. In a block of 32, group g takes column 16(g % 2) + 4(g / 2) + tile, so
  // its quads are neighbours in memory; in a block of 16, column 4(g / 2) + g % 2 + 2 tile.
  static constexpr int kBlock = !kRightHeld && N % 32 == 0 ? 32 : 16, kTiles = kBlock / 8;

  float sums[M / 16][N / 16][8];

  SOFTMETAL_INLINE static void run(const L& left, const R& right, O& out) {
    MatrixProduct product;
    product.begin(out);
    if (is_whole(left, right)) {
      product.template multiply<true>(left, right);
    } else {
      product.template multiply<false>(left, right);
    }
    product.finish(out);
  }

 private:
  SOFTMETAL_INLINE static int inner(const L& left, const R& right) {
    if constexpr (D.k != 0) {
      return K;
    } else if constexpr (!kLeftHeld) {
      return left.sizes[D.transpose_left];
    } else {
      return right.sizes[!D.transpose_right];
    }
  }

  // Whether the product lies within the operands.
  SOFTMETAL_INLINE static bool is_whole(const L& left, const R& right) {
    const int k = inner(left, right);
    bool whole = k % 16 == 0;
    if constexpr (!kLeftHeld)
      whole = whole && left.sizes[D.transpose_left] >= k && left.sizes[!D.transpose_left] >= M;
    if constexpr (!kRightHeld)
      whole = whole && right.sizes[!D.transpose_right] >= k && right.sizes[D.transpose_right] >= N;
    return whole;
  }

  template <bool whole>
  SOFTMETAL_INLINE void multiply(const L& left, const R& right) {
    if constexpr (D.k == 0) {
      const int k = inner(left, right);
      for (int i = 0; i < k; i += 16) step<whole>(left, right, i);
    } else {
#pragma unroll
      for (int i = 0; i < K; i += 16 * kSteps) step<whole>(left, right, i);
    }
  }

  template <bool whole>
  SOFTMETAL_INLINE void step(const L& left, const R& right, int k) {
    typename Multiply::Left a[M / 16][kSteps];
#pragma unroll
    for (int m = 0; m < M / 16; ++m) {
      Quad<A> upper[kSteps], lower[kSteps];
      load_left<whole>(left, m, 0, k, upper);
      load_left<whole>(left, m, 1, k, lower);
#pragma unroll
      for (int s = 0; s < kSteps; ++s) a[m][s] = Multiply::left(upper[s], lower[s]);
    }
#pragma unroll
    for (int n = 0; n < N; n += kBlock) {
      Quad<B> b[kTiles][kSteps];
      load_right<whole>(right, n, k, b);
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          const typename Multiply::Right column = Multiply::right(b[tile][s]);
#pragma unroll
          for (int m = 0; m < M / 16; ++m) {
            Multiply::accumulate(
                {sum(m, n, tile, 0), sum(m, n, tile, 1), sum(m, n, tile, 2), sum(m, n, tile, 3)}, a[m][s],
                column);
          }
        }
      }
    }
  }

  SOFTMETAL_INLINE float& sum(int m, int n, int tile, int i) {
    const int row = i / 2 * 4;
    return kBlock == 32 ? sums[m][n / 16 + i % 2][row + tile] : sums[m][n / 16][row + 2 * tile + i % 2];
  }

  template <bool whole>
  SOFTMETAL_INLINE static void load_left(const L& left, int m, int half_, int k, Quad<A> (&quads)[kSteps]) {
    const int t = lane_quad(), row = 16 * m + 8 * half_ + int(lane_group());
    if constexpr (kLeftHeld) {
#pragma unroll
      for (int i = 0; i < 4; ++i) quads[0][i] = left.elements[(m * (K / 16) + k / 16) * 8 + half_ * 4 + i];
      if constexpr (kPairs) quads[0] = exchange_columns(quads[0]);
    } else if constexpr (D.transpose_left || kPairs) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int column = k + (kPairs ? 2 * t + i / 2 * 8 + i % 2 : 4 * t + i);
        quads[0][i] = D.transpose_left ? load_element<whole>(left, column, row)
                                       : load_element<whole>(left, row, column);
      }
    } else {
      load_row<whole>(left, row, k + 4 * kSteps * t, quads);
    }
  }

  // The lane's column of each tile.
  template <bool whole>
  SOFTMETAL_INLINE static void load_right(const R& right, int n, int k, Quad<B> (&columns)[kTiles][kSteps]) {
    const int t = lane_quad(), g = lane_group();
    if constexpr (kRightHeld) {
      constexpr int inner_fragments = (D.transpose_right ? K : N) / 16;
      const int fragment =
          D.transpose_right ? n / 16 * inner_fragments + k / 16 : k / 16 * inner_fragments + n / 16;
      Quad<B> upper, lower;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        upper[i] = right.elements[fragment * 8 + i];
        lower[i] = right.elements[fragment * 8 + 4 + i];
      }
      if constexpr (D.transpose_right) {
        exchange_rows(upper, lower);
        columns[0][0] = upper;
        columns[1][0] = lower;
      } else {
        Quad<B> transposed[2];
        transpose_fragment(upper, lower, transposed);
        columns[0][0] = transposed[0];
        columns[1][0] = transposed[1];
      }
    } else if constexpr (D.transpose_right) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        load_row<whole>(right, n + column_of(g, tile), k + 4 * kSteps * t, columns[tile]);
      }
    } else if constexpr (kBlock == 32) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        Quad<B> row[1];
        load_row<whole>(right, k + 4 * t + i, n + column_of(g, 0), row);
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) columns[tile][0][i] = row[0][tile];
      }
    } else {
#pragma unroll
      for (int i = 0; i < 4 * kTiles; ++i) {
        columns[i / 4][0][i % 4] = load_element<whole>(right, k + 4 * t + i % 4, n + column_of(g, i / 4));
      }
    }
  }

  SOFTMETAL_INLINE static int column_of(int g, int tile) {
    return kBlock == 32 ? 16 * (g & 1) + 4 * (g >> 1) + tile : 4 * (g >> 1) + (g & 1) + 2 * tile;
  }

  SOFTMETAL_INLINE void begin(const O& out) {
#pragma unroll
    for (int i = 0; i < M * N / 32; ++i) {
      float& x = sums[i / (N / 2)][i / 8 % (N / 16)][i % 8];
      x = 0.0f;
      if constexpr (D.matmul_mode == Descriptor::mode::multiply_accumulate) {
        if constexpr (kOutHeld) {
          x = float(out.elements[i]);
        } else {
          x = float(load_element<false>(out, Tile::row(i), Tile::column(i)));
        }
      }
    }
  }

  SOFTMETAL_INLINE void finish(O& out) {
    typedef typename O::value_type C;
#pragma unroll
    for (int i = 0; i < M * N / 32; ++i) {
      const C x = C(sums[i / (N / 2)][i / 8 % (N / 16)][i % 8]);
      if constexpr (kOutHeld) {
        out.elements[i] = x;
      } else if (Tile::row(i) < out.sizes[1] && Tile::column(i) < out.sizes[0]) {
        out.data[Tile::row(i) * out.strides[1] + Tile::column(i)] = x;
      }
    }
  }
  typedef TileLayout<M, N, void> Tile;
};

template <unsigned long number, int threads, typename L, typename R, typename O>
SOFTMETAL_INLINE void multiply_tensors(L& left, R& right, O& out, Line) {
  static_assert(threads == 32, "only execution_simdgroup is supported here");
  MatrixProduct<number, L, R, O>::run(left, right, out);
}

}  // namespace softmetal
