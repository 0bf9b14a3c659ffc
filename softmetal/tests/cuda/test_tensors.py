"""Tensor operations on tensor cores. Without a GPU: nvcc compiles them into registers only, and their results
are right on emulated warps (warps.py)."""

from __future__ import annotations

import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from warps import CpuKernel

from softmetal.cuda.compile import Pipeline, compile_pipeline

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
needs_gcc = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")

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
  LeftMemory left_memory(a, dextents<int, 2>(sizes.x, sizes.y), array<int, 2>{1, LEFT_STRIDE});
  RightMemory right_memory(b, dextents<int, 2>(sizes.z, sizes.w), array<int, 2>{1, RIGHT_STRIDE});
#if LEFT_HELD
  typedef typename decltype(op)::template cooperative_tensor_left_input_t<A, B, float> Left;
  auto left = op.template get_left_input_cooperative_tensor<A, B, float>();
#pragma clang loop unroll(full)
  for (ushort i = 0; i < left.get_capacity(); ++i) {
    const auto at = left.get_multidimensional_index(i);
    left[i] = a[at[1] * LEFT_STRIDE + at[0]];
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
  dextents<int, 2> sizes_of_sums(N, M);
  tensor<device float, dextents<int, 2>, tensor_inline> sums(out, sizes_of_sums, array<int, 2>{1, N});
  op.run(left, right, sums);
#endif
}
"""
)

BITS = {"half": 11, "bfloat": 8, "float": 24}


def stored(values: np.ndarray, element: str) -> np.ndarray:
    if element == "bfloat":
        return (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return np.ascontiguousarray(values, {"half": np.float16, "float": np.float32}[element])


def values(array: np.ndarray, element: str) -> np.ndarray:
    if element == "bfloat":
        array = (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float64)


def product(
    m: int,
    n: int,
    k: int,
    left: str = "half",
    right: str = "half",
    *,
    transpose_left: bool = False,
    transpose_right: bool = False,
    relaxed: bool = False,
    left_held: bool = False,
    right_held: bool = False,
    out_held: bool = True,
    is_dynamic: bool = False,
    aligned: bool = True,
) -> Pipeline:
    flags = {
        "TRANSPOSE_LEFT": transpose_left,
        "TRANSPOSE_RIGHT": transpose_right,
        "RELAXED": relaxed,
        "LEFT_HELD": left_held,
        "RIGHT_HELD": right_held,
        "OUT_HELD": out_held,
    }
    macros = {name: str(int(value)) for name, value in flags.items()}
    macros |= {"M": str(m), "N": str(n), "A": left, "B": right}
    macros["K"] = "dynamic_length_v<int>" if is_dynamic else str(k)
    macros |= {
        "LEFT_STRIDE": str(m if transpose_left else k),
        "RIGHT_STRIDE": str(k if transpose_right else n),
    }
    return Pipeline(PRODUCT, "product", 32, macros=macros, std="metal4.0", aligned_runs=aligned)


def error_of(pipeline: Pipeline, m: int, n: int, k: int, folder: Path) -> float:
    """The largest error, relative to the sum of the magnitudes of the products."""
    macros = pipeline.macros
    random = np.random.default_rng(m * n + k)
    a, b = random.standard_normal((m, k)), random.standard_normal((k, n))
    transposes = (macros["TRANSPOSE_LEFT"] == "1", macros["TRANSPOSE_RIGHT"] == "1")
    left = stored(a.T if transposes[0] else a, macros["A"])
    right = stored(b.T if transposes[1] else b, macros["B"])
    out = np.ones((m, n), np.float32)
    sizes = np.array([*left.shape[::-1], *right.shape[::-1]], np.int32).tobytes()
    CpuKernel(pipeline, folder).run({0: left, 1: right, 2: out, 3: sizes}, (1, 1, 1), (32, 1, 1))
    a = values(left, macros["A"]).reshape(left.shape)
    b = values(right, macros["B"]).reshape(right.shape)
    a, b = a.T if transposes[0] else a, b.T if transposes[1] else b
    return float((np.abs(out - 1.0 - a @ b) / (np.abs(a) @ np.abs(b))).max())


PLACES = [
    {"transpose_right": True},
    {"transpose_right": True, "aligned": False},
    {},
    {"transpose_left": True},
    {"left_held": True},
    {"left_held": True, "transpose_right": True},
    {"right_held": True},
    {"right_held": True, "transpose_right": True},
    {"left_held": True, "right_held": True},
    {"left_held": True, "right_held": True, "transpose_right": True},
    {"out_held": False},
    {"is_dynamic": True, "transpose_right": True},
]


def named(options: dict[str, object]) -> str:
    return "-".join(name for name, value in options.items() if value) or "memory"


@needs_gcc
@pytest.mark.parametrize("places", PLACES, ids=named)
@pytest.mark.parametrize(("elements", "n"), [(("half", "half"), 16), (("float", "bfloat"), 32)], ids=str)
def test_products_are_right_wherever_the_operands_are(
    places: dict[str, bool], elements: tuple[str, str], n: int, tmp_path: Path
) -> None:
    """Both widths of a block."""
    pipeline = product(32, n, 32, *elements, **places)  # type: ignore[arg-type]
    assert error_of(pipeline, 32, n, 32, tmp_path) < 1e-6


@needs_gcc
@pytest.mark.parametrize("relaxed", [False, True])
@pytest.mark.parametrize("elements", list(itertools.product(BITS, BITS)), ids="-".join)
def test_products_follow_the_descriptor(elements: tuple[str, str], relaxed: bool, tmp_path: Path) -> None:
    pipeline = product(16, 32, 32, *elements, relaxed=relaxed)
    error = error_of(pipeline, 16, 32, 32, tmp_path)
    assert error < (2.0**-11 if relaxed and "float" in elements else 1e-6)


@needs_gcc
def test_relaxed_precision_is_less_precise(tmp_path: Path) -> None:
    error = error_of(product(16, 32, 32, "float", "float", relaxed=True), 16, 32, 32, tmp_path)
    assert error > 1e-5


@needs_gcc
def test_an_element_in_a_wrong_place_is_noticed(tmp_path: Path) -> None:
    pipeline = product(16, 32, 16, right_held=True, transpose_right=True)
    load = "right.load(right_memory);"
    wrong = replace(pipeline, source=pipeline.source.replace(load, f"{load} right[0] = right[1];"))
    assert error_of(wrong, 16, 32, 16, tmp_path) > 1e-3


@needs_nvcc
@pytest.mark.parametrize("places", PLACES, ids=named)
def test_nvcc_keeps_fragments_in_registers(places: dict[str, bool], tmp_path: Path) -> None:
    pipeline = product(16, 32, 32, "float", "half", relaxed=True, **places)  # type: ignore[arg-type]
    cubin = tmp_path / compile_pipeline(pipeline, tmp_path)
    resources = json.loads(cubin.with_suffix(".json").read_text())
    assert resources["stack_bytes"] == resources["spill_bytes"] == 0


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
  reduce_rows(tile, rows, reduction_operation::OPERATION, IDENTITY);
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


@needs_gcc
@pytest.mark.parametrize(("operation", "identity"), [("sum", "0.0f"), ("max", "-INFINITY"), ("min", "0.5f")])
def test_rows_are_reduced_and_found_by_iterators(operation: str, identity: str, tmp_path: Path) -> None:
    macros = {"OPERATION": operation, "IDENTITY": identity}
    pipeline = Pipeline(REDUCTION, "reduction", 32, macros=macros, std="metal4.0")
    tile = np.random.default_rng(1).standard_normal((32, 32)).astype(np.float16)
    out, facts = np.zeros((32, 32), np.float32), np.full(3, -1, np.int32)
    CpuKernel(pipeline, tmp_path).run({0: tile, 1: out, 2: facts}, (1, 1, 1), (32, 1, 1))
    wide = tile.astype(np.float32)
    want = {"sum": wide.sum(1), "max": wide.max(1), "min": np.minimum(wide.min(1), 0.5)}[operation]
    assert np.abs(out - want[:, None]).max() < 1e-5
    assert facts.tolist() == [1, 1, 0]
