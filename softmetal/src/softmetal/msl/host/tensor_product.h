// The computation of matmul2d: the last thread of the scope that arrives gathers the operands from memory, or
// from the parts of all threads, multiplies, and stores the result. A sum is a chain of fused multiply-adds
// in float (int for integers) that begins with the accumulated value; it is rounded once, to the
// destination's type.
//
// The threads report the accesses to operands in memory. Metal does not specify which thread reads what, so
// two threads read each row (its bytes count once): at least one of them did not write the row, and a missing
// barrier is found.
#pragma once
#pragma clang system_header
#include "cooperative_tensor.h"

#if __METAL_VERSION__ >= 400
#include "../common/matmul2d_descriptor.h"

namespace softmetal {

// Checked code uses artificial addresses. Reports the access to `count` elements and returns the offset to
// the memory.
template <class T>
SOFTMETAL_INLINE long access_row(T* row, int count, uint32_t kind) {
#if __has_feature(address_sanitizer)
  kind |= uint32_t(__builtin_ctz(sizeof(T))) << 8;
  return (char*)softmetal_access((void*)row, count * sizeof(T), kind) - (char*)row;
#else
  return 0;
#endif
}

// Reports this thread's share of the rows of an operand and returns the offset, which thread 0 always has if
// there is a row.
template <int threads, class Tensor>
SOFTMETAL_INLINE long note_operand(const Tensor& t, int rows, int columns, uint32_t kind) {
  long shift = 0;
#if __has_feature(address_sanitizer)
  const int thread = softmetal_current_lane()->index % threads;
  const int width = metal::min(columns, t.reach(0)), height = metal::min(rows, t.reach(1));
  const bool is_write = kind & SOFTMETAL_ACCESS_WRITE;
  if (width <= 0) return 0;
  for (int r = thread; r < height; r += threads) shift = access_row(t.data + r * t.strides[1], width, kind);
  if (threads > 1 && !is_write)
    for (int r = (thread + threads - 1) % threads; r < height; r += threads)
      access_row(t.data + r * t.strides[1], width, kind | SOFTMETAL_ACCESS_AGAIN);
#endif
  return shift;
}

// relaxed_precision lets float operands lose bits of their mantissa before the multiplication: 10 are left.
template <class Sum, bool relaxed, class T>
SOFTMETAL_INLINE Sum operand_value(T x) {
  if constexpr (relaxed && metal::is_same_v<T, float>)
    return __builtin_bit_cast(float, __builtin_bit_cast(uint32_t, x) & 0xffffe000u);
  else
    return Sum(x);
}

// Element (r, c) of an operand, r its outer dimension, goes to to[r * row_step + c * column_step].
struct Packing {
  int rows, columns, row_step, column_step;
};

template <class Sum, bool relaxed, class Tensor>
SOFTMETAL_UNCHECKED void gather_memory(Sum* to, Packing d, const Tensor& t, long shift) {
  using T = typename Tensor::value_type;
  const Sum outside = Sum(softmetal_tensor_outside());
  for (int r = 0; r < d.rows; ++r)
    for (int c = 0; c < d.columns; ++c) {
      const bool is_there = r < t.reach(1) && c < t.reach(0);
      auto* place = t.data + r * t.strides[1] + c;
      to[r * d.row_step + c * d.column_step] =
          is_there ? operand_value<Sum, relaxed>(*(T*)((char*)place + shift)) : outside;
    }
}

template <class Sum, bool relaxed, class Frame, class Tensor>
SOFTMETAL_UNCHECKED void gather_parts(Sum* to, Packing d, Frames<Frame> frames, Tensor* Frame::* operand) {
  for (int t = 0; t < Tensor::layout::threads; ++t) {
    const Tensor& part = *(frames[t].*operand);
    for (int i = 0; i < capacity_of(part.placement); ++i) {
      const int at = element_in(part.placement, t, i);
      if (at >= 0)
        to[at / d.columns * d.row_step + at % d.columns * d.column_step] =
            operand_value<Sum, relaxed>(part.elements[i]);
    }
  }
}

constexpr int kSumRows = 4, kSumColumns = 8;  // block of sums in registers

// c += a * b of m x k and k x n elements, where m and n are multiples of the block.
template <class Sum>
SOFTMETAL_UNCHECKED void multiply_add(const Sum* a, const Sum* b, Sum* c, int m, int n, int k) {
  typedef Sum Row __attribute__((ext_vector_type(kSumColumns), aligned(sizeof(Sum))));
  for (int row = 0; row < m; row += kSumRows)
    for (int column = 0; column < n; column += kSumColumns) {
      Row sums[kSumRows];
      for (int r = 0; r < kSumRows; ++r) sums[r] = *(const Row*)&c[(row + r) * n + column];
      for (int i = 0; i < k; ++i) {
        const Row right = *(const Row*)&b[i * n + column];
        for (int r = 0; r < kSumRows; ++r) {
          const Row left = a[(row + r) * k + i];
          if constexpr (metal::is_same_v<Sum, float>)
            sums[r] = __builtin_elementwise_fma(left, right, sums[r]);
          else
            sums[r] += left * right;
        }
      }
      for (int r = 0; r < kSumRows; ++r) *(Row*)&c[(row + r) * n + column] = sums[r];
    }
}

constexpr int up(int n, int unit) { return (n + unit - 1) / unit * unit; }

template <unsigned long number, int threads, class Left, class Right, class Out>
struct TensorProduct {
  using Descriptor = mpp::tensor_ops::matmul2d_descriptor;
  static constexpr Descriptor d{DescriptorNumber{number}};
  static constexpr bool accumulates = d.matmul_mode == Descriptor::mode::multiply_accumulate;
  using OutElement = typename Out::value_type;
  using Sum = metal::conditional_t<metal::is_same_v<OutElement, int>, int, float>;
  struct Frame {
    Left* left;
    Right* right;
    Out* out;
    int k;
    long left_shift, right_shift, out_shift;
  };

  // The length of the sums. An operand in memory that is shorter is undefined behaviour, and so is an inner
  // stride other than 1: both end the dispatch.
  SOFTMETAL_INLINE static int inner_length(const Left& left, const Right& right, const Out& out, Line line) {
    int k = d.k;
    if constexpr (d.k == 0 && !is_cooperative_v<Left>)
      k = left.sizes[d.transpose_left ? 1 : 0];
    else if constexpr (d.k == 0)
      k = right.sizes[d.transpose_right ? 0 : 1];
    if constexpr (!is_cooperative_v<Left>)
      require(left, k, d.transpose_left ? 1 : 0, SOFTMETAL_TENSOR_SHORT_LEFT, line);
    if constexpr (!is_cooperative_v<Right>)
      require(right, k, d.transpose_right ? 0 : 1, SOFTMETAL_TENSOR_SHORT_RIGHT, line);
    if constexpr (!is_cooperative_v<Out>) require_rows(out, line);
    return k;
  }
  template <class Tensor>
  SOFTMETAL_INLINE static void require(const Tensor& t, int k, int dimension, uint32_t misuse, Line line) {
    require_rows(t, line);
    if (t.reach(dimension) < k) softmetal_tensor_fail(misuse, k, t.reach(dimension), line.number);
  }
  template <class Tensor>
  SOFTMETAL_INLINE static void require_rows(const Tensor& t, Line line) {
    if (t.strides[0] != 1) softmetal_tensor_fail(SOFTMETAL_TENSOR_STRIDE, t.strides[0], 0, line.number);
  }

  // Reports the accesses of this thread; returns its frame.
  SOFTMETAL_INLINE static Frame bring(Left& left, Right& right, Out& out, int k) {
    Frame frame{&left, &right, &out, k, 0, 0, 0};
    if constexpr (is_cooperative_v<Left>)
      note_elements(left, 0);
    else
      frame.left_shift =
          note_operand<threads>(left, d.transpose_left ? k : d.m, d.transpose_left ? d.m : k, 0);
    if constexpr (is_cooperative_v<Right>)
      note_elements(right, 0);
    else
      frame.right_shift =
          note_operand<threads>(right, d.transpose_right ? d.n : k, d.transpose_right ? k : d.n, 0);
    constexpr uint32_t write =
        SOFTMETAL_ACCESS_WRITE | SOFTMETAL_ACCESS_LATER | (accumulates ? SOFTMETAL_ACCESS_UPDATE : 0);
    if constexpr (is_cooperative_v<Out>) {
      if (accumulates) note_elements(out, 0);
      note_elements(out, SOFTMETAL_ACCESS_WRITE);
    } else {
      frame.out_shift = note_operand<threads>(out, d.m, d.n, write);
    }
    return frame;
  }

  SOFTMETAL_UNCHECKED static void run(Frames<Frame> frames) {
    const Frame& first = frames[0];
    const int k = first.k, m = up(d.m, kSumRows), n = up(d.n, kSumColumns);
    softmetal_thread_counters()->tensor_products +=
        uint64_t(up(d.m, 8) / 8) * (up(d.n, 8) / 8) * (up(k, 8) / 8);
    Sum* a = (Sum*)softmetal_scratch((m * k + k * n + m * n) * sizeof(Sum));
    Sum *b = a + m * k, *c = b + k * n;
    for (int i = 0; i < m * k + k * n + m * n; ++i) a[i] = 0;

    const Packing to_a = d.transpose_left ? Packing{k, d.m, 1, k} : Packing{d.m, k, k, 1};
    const Packing to_b = d.transpose_right ? Packing{d.n, k, 1, n} : Packing{k, d.n, n, 1};
    if constexpr (is_cooperative_v<Left>)
      gather_parts<Sum, d.relaxed_precision>(a, to_a, frames, &Frame::left);
    else
      gather_memory<Sum, d.relaxed_precision>(a, to_a, *first.left, first.left_shift);
    if constexpr (is_cooperative_v<Right>)
      gather_parts<Sum, d.relaxed_precision>(b, to_b, frames, &Frame::right);
    else
      gather_memory<Sum, d.relaxed_precision>(b, to_b, *first.right, first.right_shift);

    exchange<false>(c, n, frames);
    multiply_add(a, b, c, m, n, k);
    exchange<true>(c, n, frames);
  }

 private:
  template <bool put>
  SOFTMETAL_INLINE static void move(Sum& sum, OutElement& element) {
    if (put)
      element = OutElement(sum);
    else
      sum = Sum(element);
  }
  // Reads the accumulator from the destination, or stores the result there.
  template <bool put>
  SOFTMETAL_UNCHECKED static void exchange(Sum* c, int n, Frames<Frame> frames) {
    if (!put && !accumulates) return;
    if constexpr (is_cooperative_v<Out>) {
      for (int t = 0; t < threads; ++t) {
        Out& part = *frames[t].out;
        for (int i = 0; i < capacity_of(part.placement); ++i)
          if (const int at = element_in(part.placement, t, i); at >= 0)
            move<put>(c[at / d.n * n + at % d.n], part.elements[i]);
      }
    } else {
      const Out& out = *frames[0].out;
      for (int r = 0; r < metal::min(d.m, out.reach(1)); ++r)
        for (int col = 0; col < metal::min(d.n, out.reach(0)); ++col) {
          auto* place = out.data + r * out.strides[1] + col;
          move<put>(c[r * n + col], *(OutElement*)((char*)place + frames[0].out_shift));
        }
    }
  }
};

template <unsigned long number, int threads, class Left, class Right, class Out>
SOFTMETAL_INLINE void multiply_tensors(Left& left, Right& right, Out& out, Line line) {
  if constexpr (threads > SOFTMETAL_SIMD_WIDTH) {
    const int simdgroups = simdgroups_of_threadgroup();
    if (simdgroups * SOFTMETAL_SIMD_WIDTH != threads)
      softmetal_tensor_fail(SOFTMETAL_TENSOR_SCOPE, threads / SOFTMETAL_SIMD_WIDTH, simdgroups, line.number);
  }
  using Product = TensorProduct<number, threads, Left, Right, Out>;
  const int k = Product::inner_length(left, right, out, line);
  typename Product::Frame frame = Product::bring(left, right, out, k);
  run_together<Product, threads>(frame, line);
}
}  // namespace softmetal
#include "../common/matmul2d.h"
#endif
