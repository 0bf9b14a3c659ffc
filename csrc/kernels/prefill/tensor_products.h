// The two products of a step on Metal 4's tensor operations: scores = query keys^T and output += weights
// values, for the 16 rows of a simdgroup (backward: backward/tensor_gradients.h). The layout of a cooperative
// tensor over the lanes depends on GPU, descriptor and dtype, so the kernels query the coordinates of each
// element.
//
// Products never read past the extents of an operand, which Metal leaves undefined. All rows of an operand
// exist in the cache, or it is copied to threadgroup memory and padded with zeros.
#pragma once

#include <metal_tensor>
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>

#include "../common/config.h"

using namespace mpp::tensor_ops;

namespace fattn {

FATTN_CONSTEXPR int kTensorDim = (kHeadDim + 31) / 32 * 32;  // heads of 72 and 80 are padded
FATTN_CONSTEXPR bool kPadded = kTensorDim != kHeadDim;
// Whether prefill_latent_tensor runs these heads: a score product then sums over some of their columns.
FATTN_CONSTEXPR bool kLatent = kHeadDim != kValueDim;
FATTN_CONSTEXPR int kShareDim =
    (kLatent ? kValueDim : kTensorDim) / kColumnShares;  // of a simdgroup's output
static_assert(kShareDim / 2 <= kMaxOutElements, "the self-test allows no more elements of the output");
// Rows of the right operand of a step: keys or, in the backward pass over keys, query rows.
#ifdef FATTN_STEP_ROWS
FATTN_CONSTEXPR int kWalked = FATTN_STEP_ROWS;
#else
FATTN_CONSTEXPR int kWalked = kTileKeys;
#endif
// The keys of a score product, and the columns that it sums over.
FATTN_CONSTEXPR int kProductKeys = kLatent ? kLatentProductKeys : kWalked;
FATTN_CONSTEXPR int kProductDim = kLatent ? kLatentProductDim : kTensorDim;
FATTN_CONSTEXPR int kScorePitch = score_pitch(kWalked);
// Whether products may round weights to ten bits. The error is then that of half, too large for a result in
// half.
FATTN_CONSTEXPR bool kRelaxed = is_same_v<Element, bfloat>;

// Tensor operations take no const elements.
typedef tensor<device Element, dextents<int, 2>, tensor_inline> CacheTensor;
typedef tensor<threadgroup Element, dextents<int, 2>, tensor_inline> SharedTensor;
typedef tensor<threadgroup float, dextents<int, 2>, tensor_inline> SharedWeights;

// Operands are copied to threadgroup memory in chunks.
FATTN_CONSTEXPR int kChunk = 16 / sizeof(Element);  // elements
FATTN_CONSTEXPR int kRowChunks = kTensorDim / kChunk;
static_assert(kHeadDim % kChunk == 0, "a chunk is of the head, or all padding");

inline uint4 chunk_at(const device Element* row, int column) {
  return *reinterpret_cast<const device uint4*>(row + column);
}

// The columns from `column` on of rows in device memory, or of staged rows.
inline CacheTensor tensor_of_rows(const device Element* rows, long stride, int column, int columns) {
  return CacheTensor((device Element*)(rows + column), dextents<int, 2>(columns, kProductKeys),
                     array<int, 2>{1, int(stride)});
}
inline SharedTensor staged_piece(threadgroup uint4* rows, int pitch, int column, int columns, int count) {
  return SharedTensor(reinterpret_cast<threadgroup Element*>(rows) + column, dextents<int, 2>(columns, count),
                      array<int, 2>{1, pitch});
}
inline SharedTensor staged_tensor(threadgroup uint4* rows, int column, int columns, int count) {
  return staged_piece(rows, kTensorDim, column, columns, count);
}

}  // namespace fattn

// Descriptors are local to a function, as in most public code. The mode is explicit: its default differs
// between versions of Metal.
#define FATTN_TENSOR_PRODUCTS                                                                               \
  constexpr auto scores_of = matmul2d_descriptor(                                                           \
      kTensorRows, kProductKeys, kProductDim, false, true, false,                                           \
      kLatent ? matmul2d_descriptor::mode::multiply_accumulate : matmul2d_descriptor::mode::multiply);      \
  constexpr auto output_of = matmul2d_descriptor(kTensorRows, kShareDim, kProductKeys, false, false,        \
                                                 kRelaxed, matmul2d_descriptor::mode::multiply_accumulate); \
  typedef matmul2d<scores_of, execution_simdgroup> ScoreProduct;                                            \
  typedef matmul2d<output_of, execution_simdgroup> OutputProduct;                                           \
  ScoreProduct score_product;                                                                               \
  OutputProduct output_product;                                                                             \
  FATTN_TENSOR_WEIGHTS                                                                                      \
  auto scores = FATTN_TENSOR_SCORES;                                                                        \
  auto output = output_product.template get_destination_cooperative_tensor<Weights, CacheTensor, float>();

// More tensors with the elements of `scores`, and one with a sum for each of its rows.
#define FATTN_TENSOR_SCORES \
  score_product.template get_destination_cooperative_tensor<SharedTensor, CacheTensor, float>()
// With registers, rows of scores are reduced, and the scores are the left operand of the second product in
// place. Otherwise this operand is in threadgroup memory, and the source uses neither reductions nor
// cooperative operands, so systems without them compile it too.
#if FATTN_REGISTERS
#define FATTN_TENSOR_REDUCED \
  score_product.template get_row_reduction_destination_cooperative_tensor<SharedTensor, CacheTensor, float>()
#define FATTN_TENSOR_WEIGHTS \
  typedef typename OutputProduct::template cooperative_tensor_left_input_t<float, Element, float> Weights;
#else
#define FATTN_TENSOR_REDUCED 0
#define FATTN_TENSOR_WEIGHTS typedef SharedWeights Weights;
#endif

// The elements of a cooperative tensor that this lane holds.
#define FATTN_EACH_ELEMENT(i, held)                  \
  FATTN_UNROLL                                       \
  for (ushort i = 0; i < (held).get_capacity(); i++) \
    if ((held).is_valid_element(i))
