// Metal 4's tensors, cooperative tensors and matmul2d. The format of this file: ../catalogue.py

// --- setup
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
using namespace mpp::tensor_ops;
kernel void k(device half* a, device half* b, device float* c, ushort lane [[thread_index_in_simdgroup]]) {
  matmul2d<matmul2d_descriptor(16, 32, 16), execution_simdgroup> op;
  tensor<device half, dextents<int, 2>, tensor_inline> A(a, dextents<int, 2>(16, 16));
  tensor<device half, dextents<int, 2>, tensor_inline> B(b, dextents<int, 2>(32, 16));
  tensor<device float, dextents<int, 2>, tensor_inline> C(c, dextents<int, 2>(32, 16));

// --- tensors_in_31 | rejected (certain) | MPPTensorOpsMatMul2d.h | Before MSL 4.0 the tensor headers are empty.
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
kernel void k(device float* c) {
  constexpr auto of = matmul2d_descriptor(16, 32, 16);  // error
  c[0] = of.m;
}
// --- guarded_in_31 | accepted
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
#if defined(__HAVE_TENSOR__)
using namespace mpp::tensor_ops;
#endif
kernel void k(device float* c) { c[0] = 1; }

// --- operands_in_memory | accepted (certain, metal4.0) | MPPTensorOpsMatMul2d.h | Operands and result are tensors over device memory.
  op.run(A, B, C);
// --- spelled_out | accepted
  constexpr auto of = mpp::tensor_ops::matmul2d_descriptor(16, 32, static_cast<int>(dynamic_extent), false, false, true,
                                                           mpp::tensor_ops::matmul2d_descriptor::mode::multiply);
  mpp::tensor_ops::matmul2d<of, metal::execution_simdgroup> spelled_out;
  spelled_out.run(A, B, C);
// --- deduced_tensors | accepted
  tensor left(a, dextents<int, 2>(16, 16), array<int, 2>{1, 16});
  auto right = tensor(b, extents<int, 32, 16>());
  op.run(left, right, C);
// --- in_a_lambda | accepted
  auto go = [&](auto scale) {
    op.run(A, B, C);
    c[0] *= scale;
  };
  go(1.0f);

// --- handles | rejected (certain, metal4.0) | MSL 4; MPPTensorOpsMatMul2d.h | A tensor with a handle is a parameter, and an operand like its slices.
kernel void k(tensor<device half, dextents<int, 2>> a [[buffer(0)]], tensor<device float, dextents<int, 2>> c [[buffer(1)]]) {
  tensor<device half, dextents<int, 2>> b;  // error
  auto b = a.slice(16, 0);  // accepted
  mpp::tensor_ops::matmul2d<mpp::tensor_ops::matmul2d_descriptor(16, 32, 16), execution_simdgroup>().run(a, b, c);
}

// --- elements_and_space | rejected (certain, metal4.0) | MSL 4; MPPTensorOpsMatMul2d.h | The elements of an operand are not const, and are in the tensor's address space.
  tensor<device const half, dextents<int, 2>, tensor_inline> left(a, dextents<int, 2>(16, 16));  // error
  tensor<threadgroup half, dextents<int, 2>, tensor_inline> left(a, dextents<int, 2>(16, 16));  // error
  tensor<device half, dextents<int, 2>, tensor_inline> left(a, dextents<int, 2>(16, 16));  // accepted

// --- const_operand | rejected (certain, metal4.0) | MPPTensorOpsMatMul2d.h | run takes its operands as lvalues that are not const.
  const auto left = A;  // rejected
  auto left = A;  // accepted
  op.run(left, B, C);  // error: const
  op.run(left, B, C);  // accepted

// --- copy_of_a_cooperative_tensor | rejected (likely, metal4.0) | MPPTensorOpsMatMul2d.h | A copy constructor copies the wrong way round, so no kernel may copy.
  auto sums = op.get_destination_cooperative_tensor<decltype(A), decltype(B), float>();
  auto same = sums;  // error
  thread auto& same = sums;  // accepted
  op.run(A, B, same);

// --- neither_m_nor_n_of_16 | rejected (certain, metal4.0) | llama.cpp #21048 | M or N is a multiple of 16.
  matmul2d<matmul2d_descriptor(8, 8, 16), execution_simdgroup> small;  // rejected
  matmul2d<matmul2d_descriptor(8, 16, 16), execution_simdgroup> small;  // accepted
  small.run(A, B, C);  // error: At least one of M or N must be a multiple of 16
  small.run(A, B, C);  // accepted

// --- types_of_a_product | rejected (certain, metal4.0) | MSL 4, table 7.3 | A product of floats is not half.
  tensor<device float, dextents<int, 2>, tensor_inline> left(c, dextents<int, 2>(16, 16));  // rejected
  tensor<device half, dextents<int, 2>, tensor_inline> left(a, dextents<int, 2>(16, 16));  // accepted
  tensor<device half, dextents<int, 2>, tensor_inline> out(a, dextents<int, 2>(32, 16));
  op.run(left, B, out);  // error: unsupported data type
  op.run(left, B, out);  // accepted

// --- inputs | rejected (certain, metal4.0) | MPPTensorOpsMatMul2d.h | A cooperative input belongs to one simdgroup, with a static K and 16 or 32 rows.
  matmul2d<matmul2d_descriptor(16, 32), execution_simdgroup>().get_left_input_cooperative_tensor<half, half, float>();  // error: Inner dimension cannot be dynamic
  matmul2d<matmul2d_descriptor(64, 32, 16), execution_simdgroup>().get_left_input_cooperative_tensor<half, half, float>();  // error: M must be 16 or 32
  matmul2d<matmul2d_descriptor(32, 32, 16), execution_simdgroups<2>>().get_left_input_cooperative_tensor<half, half, float>();  // error: single SIMD group
  matmul2d<matmul2d_descriptor(32, 32, 16), execution_simdgroup>().get_left_input_cooperative_tensor<half, half, float>();  // accepted

// --- two_cooperative_inputs | rejected (certain, metal4.0) | MPPTensorOpsMatMul2d.h | With two cooperative inputs M, N or K is 32.
  matmul2d<matmul2d_descriptor(16, 16, 16), execution_simdgroup> other;  // rejected
  matmul2d<matmul2d_descriptor(16, 16, 32), execution_simdgroup> other;  // accepted
  auto left = other.get_left_input_cooperative_tensor<half, half, float>();
  auto right = other.get_right_input_cooperative_tensor<half, half, float>();
  auto sums = other.get_destination_cooperative_tensor<decltype(left), decltype(right), float>();
  other.run(left, right, sums);  // error: must be 32
  other.run(left, right, sums);  // accepted

// --- element_of_an_input | rejected (certain, metal4.0) | MPPTensorOpsMatMul2d.h | An input made of a destination has its element type.
  auto sums = op.get_destination_cooperative_tensor<decltype(A), decltype(B), float>();
  auto left = op.get_left_input_cooperative_tensor<half, half, float>(sums);  // error: element type
  auto left = op.get_left_input_cooperative_tensor<float, half, float>(sums);  // accepted
  left[0] = 1;

// --- reduction_of_another_product | rejected (certain, metal4.0) | MPPTensorOpsMatMul2d.h | A reduction belongs to the descriptor and operands of its source.
  auto sums = op.get_destination_cooperative_tensor<decltype(A), decltype(B), float>();
  matmul2d<matmul2d_descriptor(16, 32, 32), execution_simdgroup> other;  // rejected
  matmul2d<matmul2d_descriptor(16, 32, 16), execution_simdgroup> other;  // accepted
  auto rows = other.get_row_reduction_destination_cooperative_tensor<decltype(A), decltype(B), float>();
  reduce_rows(sums, rows, reduction_operation::sum, 0.0f);  // error: descriptors and operand types must match
  reduce_rows(sums, rows, reduction_operation::sum, 0.0f);  // accepted

// --- mapping_of_another_height | rejected (certain, metal4.0) | MPPTensorOpsMatMul2d.h | map_iterator needs a source of the same rows.
  matmul2d<matmul2d_descriptor(32, 32, 16), execution_simdgroup> other;  // rejected
  matmul2d<matmul2d_descriptor(16, 64, 16), execution_simdgroup> other;  // accepted
  auto rows = op.get_row_reduction_destination_cooperative_tensor<decltype(A), decltype(B), float>();
  auto sums = other.get_destination_cooperative_tensor<decltype(A), decltype(B), float>();
  *sums.begin() = *rows.map_iterator(sums.begin());  // error: matching M or N dimension
  *sums.begin() = *rows.map_iterator(sums.begin());  // accepted

// --- cooperative_tensor_in_threadgroup_memory | rejected (likely, metal4.0) | MSL 4 | A cooperative tensor is a variable of the threads.
  threadgroup decltype(op.get_left_input_cooperative_tensor<half, half, float>()) left;  // error
  auto left = op.get_left_input_cooperative_tensor<half, half, float>();  // accepted
  left[0] = a[0];  // accepted
