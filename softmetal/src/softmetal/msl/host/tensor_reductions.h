// <MetalPerformancePrimitives/MPPTensorOpsMatMul2d.h>: sums and extremes of a destination's rows or columns.
// From MSL 4.0 on.
#pragma once
#pragma clang system_header
#include "tensor_product.h"

#if __METAL_VERSION__ >= 400
namespace softmetal {
template <class Source, class Result>
struct TensorReduction {
  using T = typename Source::element_type;
  using SourceLayout = typename Source::layout;
  using ResultLayout = typename Result::layout;
  using Operation = mpp::tensor_ops::reduction_operation;
  struct Frame {
    Source* source;
    Result* result;
    T identity;
    Operation operation;
  };

  SOFTMETAL_UNCHECKED static void run(Frames<Frame> frames) {
    ++softmetal_thread_counters()->simd_reductions;
    T values[ResultLayout::lines];
    for (T& value : values) value = frames[0].identity;
    for (int t = 0; t < SourceLayout::threads; ++t) {
      const Source& part = *frames[t].source;
      for (int i = 0; i < capacity_of(part.placement); ++i) {
        const int at = element_in(part.placement, t, i);
        if (at < 0) continue;
        T& value = values[ResultLayout::of_rows ? at / SourceLayout::columns : at % SourceLayout::columns];
        value = combine(frames[0].operation, value, part.elements[i]);
      }
    }
    for (int t = 0; t < ResultLayout::threads; ++t) {
      Result& part = *frames[t].result;
      for (int i = 0; i < capacity_of(part.placement); ++i)
        if (const int at = element_in(part.placement, t, i); at >= 0) part.elements[i] = values[at];
    }
  }

 private:
  SOFTMETAL_INLINE static T combine(Operation operation, T a, T b) {
    if (operation == Operation::sum) return T(a + b);
    return operation == Operation::max ? metal::max(a, b) : metal::min(a, b);
  }
};

template <class T, class X, class Y, class SourceLayout, class ResultLayout>
SOFTMETAL_INLINE void reduce_tensor(metal::cooperative_tensor<T, X, SourceLayout>& source,
                                    metal::cooperative_tensor<T, Y, ResultLayout>& result,
                                    mpp::tensor_ops::reduction_operation operation, T identity, Line line) {
  static_assert(SourceLayout::role == SOFTMETAL_TENSOR_DESTINATION, "only destinations are reduced");
  static_assert(metal::is_same_v<typename SourceLayout::Operation, typename ResultLayout::Operation>,
                "Source and destination descriptors and operand types must match");
  using Reduction = TensorReduction<metal::cooperative_tensor<T, X, SourceLayout>,
                                    metal::cooperative_tensor<T, Y, ResultLayout>>;
  note_elements(source, 0);
  note_elements(result, SOFTMETAL_ACCESS_WRITE);
  typename Reduction::Frame frame{&source, &result, identity, operation};
  run_together<Reduction, SourceLayout::threads>(frame, line);
}
}  // namespace softmetal

namespace mpp {
namespace tensor_ops {
// The identity is 0 for every operation, as in Apple's header: a maximum of negative numbers needs its own.
template <class T, class X, class Y, class SourceLayout, class ResultLayout>
SOFTMETAL_INLINE void reduce_rows(metal::cooperative_tensor<T, X, SourceLayout>& source,
                                  metal::cooperative_tensor<T, Y, ResultLayout>& result,
                                  reduction_operation operation = reduction_operation::sum, T identity = T(0),
                                  ::softmetal::Line line = ::softmetal::Line(__builtin_LINE())) {
  static_assert(ResultLayout::role == SOFTMETAL_TENSOR_ROW_REDUCTION,
                "the result must be a reduction of rows");
  ::softmetal::reduce_tensor(source, result, operation, identity, line);
}
template <class T, class X, class Y, class SourceLayout, class ResultLayout>
SOFTMETAL_INLINE void reduce_columns(metal::cooperative_tensor<T, X, SourceLayout>& source,
                                     metal::cooperative_tensor<T, Y, ResultLayout>& result,
                                     reduction_operation operation = reduction_operation::sum,
                                     T identity = T(0),
                                     ::softmetal::Line line = ::softmetal::Line(__builtin_LINE())) {
  static_assert(ResultLayout::role == SOFTMETAL_TENSOR_COLUMN_REDUCTION,
                "the result must be a reduction of columns");
  ::softmetal::reduce_tensor(source, result, operation, identity, line);
}

// Whether every thread holds the row (or column) of each of its elements.
template <class T, class U, class X, class Y, class SourceLayout, class ResultLayout>
SOFTMETAL_INLINE bool is_iterator_compatible(const metal::cooperative_tensor<T, X, SourceLayout>& source,
                                             const metal::cooperative_tensor<U, Y, ResultLayout>& reduction) {
  constexpr bool by_row = ResultLayout::of_rows;
  constexpr int lines = by_row ? SourceLayout::rows : SourceLayout::columns;
  if (!metal::is_same_v<T, U> || ResultLayout::lines != lines) return false;
  return ::softmetal::holds_lines<SourceLayout>(source.placement, reduction.placement, by_row);
}
}  // namespace tensor_ops
}  // namespace mpp
#endif
