"""Tensor operations on tensor cores: nvcc keeps them in registers.

`python -m bench cuda-check` compares results, on a GPU.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from softmetal.cuda.compile import Pipeline, compile_pipeline

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")

PRELUDE = """
#include <metal_stdlib>
#include <metal_tensor>
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
using namespace metal;
using namespace mpp::tensor_ops;
"""

# Operands are in memory, or in cooperative tensors that are filled by their coordinates.
PRODUCT = (
    PRELUDE
    + """
typedef tensor<device A, dextents<int, 2>, tensor_inline> LeftMemory;
typedef tensor<device B, dextents<int, 2>, tensor_inline> RightMemory;
kernel void product(device A* a [[buffer(0)]], device B* b [[buffer(1)]], device float* out [[buffer(2)]],
                    constant int4& sizes [[buffer(3)]]) {
  constexpr auto d = matmul2d_descriptor(M, N, K, TRANSPOSE_LEFT, TRANSPOSE_RIGHT, RELAXED,
                                         matmul2d_descriptor::mode::multiply_accumulate);
  matmul2d<d, execution_simdgroup> op;
  LeftMemory left_memory(a, dextents<int, 2>(sizes.x, sizes.y));
  RightMemory right_memory(b, dextents<int, 2>(sizes.z, sizes.w));
#if LEFT_HELD
  typedef typename decltype(op)::template cooperative_tensor_left_input_t<A, B, float> Left;
  auto left = op.template get_left_input_cooperative_tensor<A, B, float>();
#pragma clang loop unroll(full)
  for (ushort i = 0; i < left.get_capacity(); ++i) {
    const auto at = left.get_multidimensional_index(i);
    left[i] = a[at[1] * sizes.x + at[0]];
  }
#else
  typedef LeftMemory Left;
  thread auto& left = left_memory;
#endif
#if RIGHT_HELD
  typedef typename decltype(op)::template cooperative_tensor_right_input_t<A, B, float> Right;
  auto right = op.template get_right_input_cooperative_tensor<A, B, float>();
  right.load(right_memory);
#else
  typedef RightMemory Right;
  thread auto& right = right_memory;
#endif
#if OUT_HELD
  auto sums = op.template get_destination_cooperative_tensor<Left, Right, float>();
#pragma clang loop unroll(full)
  for (ushort i = 0; i < sums.get_capacity(); ++i) sums[i] = 1.0f;
  op.run(left, right, sums);
#pragma clang loop unroll(full)
  for (ushort i = 0; i < sums.get_capacity(); ++i) {
    const auto at = sums.get_multidimensional_index(i);
    out[at[1] * N + at[0]] = sums[i];
  }
#else
  tensor<device float, dextents<int, 2>, tensor_inline> sums(out, dextents<int, 2>(N, M));
  op.run(left, right, sums);
#endif
}
"""
)


DEFAULTS = {
    "M": 16, "N": 32, "K": 32, "A": "float", "B": "half", "TRANSPOSE_LEFT": 0, "TRANSPOSE_RIGHT": 0,
    "RELAXED": 1, "LEFT_HELD": 0, "RIGHT_HELD": 0, "OUT_HELD": 1,
}  # fmt: skip
# Beside the combinations of the kernels that tests/bench/test_tensor_peers.py compiles.
CASES: list[dict[str, object]] = [
    {"TRANSPOSE_LEFT": 1, "A": "half", "B": "bfloat", "RELAXED": 0},
    {"TRANSPOSE_RIGHT": 1, "K": "dynamic_length_v<int>"},
    {"A": "bfloat", "B": "float", "N": 16, "RELAXED": 0},
    {"RIGHT_HELD": 1},
    {"LEFT_HELD": 1, "RIGHT_HELD": 1, "TRANSPOSE_RIGHT": 1},
    {"OUT_HELD": 0},
]


def in_memory(pipeline: Pipeline, folder: Path) -> int:
    """The bytes that nvcc does not keep in registers."""
    cubin = folder / compile_pipeline(pipeline, folder)
    resources = json.loads(cubin.with_suffix(".json").read_text())
    return int(resources["stack_bytes"] + resources["spill_bytes"])


@needs_nvcc
@pytest.mark.parametrize("macros", CASES, ids=str)
def test_products_stay_in_registers(macros: dict[str, object], tmp_path: Path) -> None:
    given = {name: str(value) for name, value in {**DEFAULTS, **macros}.items()}
    pipeline = Pipeline(PRODUCT, "product", 32, macros=given, std="metal4.0", aligned_runs=True)
    assert in_memory(pipeline, tmp_path) == 0


REDUCTION = (
    PRELUDE
    + """
typedef tensor<device half, dextents<int, 2>, tensor_inline> Memory;
kernel void reduction(device half* a [[buffer(0)]], device float* out [[buffer(1)]],
                      device int* facts [[buffer(2)]], ushort lane [[thread_index_in_simdgroup]]) {
  constexpr auto d = matmul2d_descriptor(32, 32, 16);
  constexpr auto next = matmul2d_descriptor(32, 16, 32);
  matmul2d<d, execution_simdgroup> op;
  matmul2d<next, execution_simdgroup> next_op;
  auto tile = op.template get_destination_cooperative_tensor<Memory, Memory, float>();
  auto rows = op.template get_row_reduction_destination_cooperative_tensor<Memory, Memory, float>();
#pragma clang loop unroll(full)
  for (ushort i = 0; i < tile.get_capacity(); ++i) {
    const auto at = tile.get_multidimensional_index(i);
    tile[i] = a[at[1] * 32 + at[0]];
  }
  reduce_rows(tile, rows, reduction_operation::min, 0.5f);
  auto it = tile.begin();
#pragma clang loop unroll(full)
  for (ushort i = 0; i < tile.get_capacity(); ++i, ++it) {
    const auto at = tile.get_multidimensional_index(i);
    out[at[1] * 32 + at[0]] = *rows.map_iterator(it);
  }
  if (lane == 0) {
    facts[0] = is_iterator_compatible(tile, rows);
    facts[1] = next_op.template is_compatible_as_left_input<float, half, float>(tile);
    facts[2] = op.template is_compatible_as_left_input<float, half, float>(tile);  // of another shape
  }
}
"""
)


@needs_nvcc
def test_reductions_stay_in_registers(tmp_path: Path) -> None:
    assert in_memory(Pipeline(REDUCTION, "reduction", 32, std="metal4.0"), tmp_path) == 0
