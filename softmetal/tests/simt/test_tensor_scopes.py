"""matmul2d of all simdgroups of a threadgroup together, and of one thread alone."""

from __future__ import annotations

import pytest
import torch
from tensor_programs import HALF_OPERANDS, PROLOGUE, layouts

from softmetal.testing import KernelError, Library

CHECKS = "race,bounds,uninit"
SOURCE = (
    PROLOGUE
    + HALF_OPERANDS
    + """
#define OPERANDS                                                                    \\
  constexpr auto of = matmul2d_descriptor(64, 32, 32, false, true);                 \\
  matmul2d<of, SCOPE> multiply;                                                     \\
  Operand left(a, dextents<int, 2>(32, 64)), right(b, dextents<int, 2>(32, 32));    \\
  Result out(c, dextents<int, 2>(32, 64));
#define ARGUMENTS                                                                            \\
  device half *a [[buffer(0)]], device half *b [[buffer(1)]], device float *c [[buffer(2)]], \\
      ushort index [[thread_index_in_threadgroup]], ushort size [[threads_per_threadgroup]]

kernel void in_memory(ARGUMENTS) {
  OPERANDS
  multiply.run(left, right, out);
}

kernel void cooperative(ARGUMENTS) {
  OPERANDS
  auto sums = multiply.get_destination_cooperative_tensor<Operand, Operand, float>();
  multiply.run(left, right, sums);
  for (auto it = sums.begin(); it != sums.end(); ++it)
    if (it.is_valid_element()) *it *= 2;
  sums.store(out);
}

// Every thread copies its part of the left operand, which all simdgroups read.
kernel void shared(ARGUMENTS) {
  OPERANDS
  threadgroup half tile[64 * 32];
  Shared copy(tile, dextents<int, 2>(32, 64));
  for (int i = index; i < 64 * 32; i += size) tile[i] = a[i];
  BEFORE
  multiply.run(copy, right, out);
  AFTER
  for (int i = index; i < 64 * 32; i += size) tile[i] = 0;
}

kernel void some_of_them(ARGUMENTS) {
  OPERANDS
  if (index < 64) multiply.run(left, right, out);
}
"""
)
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
SIMDGROUPS = {"execution_simdgroups<4>": 4, "execution_simdgroups<2>": 2}


def library(scope: str, mode: str = "checked", before: str = BARRIER, after: str = BARRIER) -> Library:
    defines = {"SCOPE": scope, "BEFORE": before, "AFTER": after}
    return Library(SOURCE, defines=defines, mode=mode, std="metal4.0")


def run(built: Library, kernel: str, threads: int, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-8, 9, (rows, 32), generator=generator).half() / 4 for rows in (64, 32))
    out = torch.full((64, 32), float("nan"))
    built.pipeline(kernel).run([a, b, out], (1, 1, 1), (threads, 1, 1), **options)
    return out.double(), a.double() @ b.double().T


@pytest.mark.parametrize("scope", SIMDGROUPS)
def test_simdgroups_together(scope: str) -> None:
    built = library(scope)
    for layout in layouts():
        for order in ("forward", "reverse", "random:7"):
            for kernel, factor in (("in_memory", 1), ("cooperative", 2), ("shared", 1)):
                threads = 32 * SIMDGROUPS[scope]
                found, expected = run(
                    built, kernel, threads, checks=CHECKS, order=order, tensor_layout=layout
                )
                assert torch.equal(found, factor * expected), (layout, order, kernel)


def test_operations_count_once_without_a_barrier() -> None:
    built = library("execution_simdgroups<4>", mode="fast")
    a, b, out = torch.zeros(64, 32).half(), torch.zeros(32, 32).half(), torch.zeros(64, 32)
    counters = built.pipeline("in_memory").run([a, b, out], (3, 1, 1), (128, 1, 1))
    assert counters["tensor_products"] == 3 * 8 * 4 * 4
    assert counters["threadgroup_barriers"] == 0


@pytest.mark.parametrize("missing", ["before", "after"])
def test_races_between_simdgroups(missing: str) -> None:
    run(library("execution_simdgroups<4>"), "shared", 128, checks=CHECKS)
    simdgroup_only = {missing: "simdgroup_barrier(mem_flags::mem_threadgroup);"}
    with pytest.raises(KernelError, match="race: .*threadgroup array 'tile'"):
        run(library("execution_simdgroups<4>", **simdgroup_only), "shared", 128, checks=CHECKS)


def test_the_scope_is_the_whole_threadgroup() -> None:
    built = library("execution_simdgroups<4>", mode="fast")
    with pytest.raises(KernelError, match="tensor: .*matmul2d of 4 simdgroups in a threadgroup of 2"):
        run(built, "in_memory", 64)
    with pytest.raises(KernelError, match="divergence: .*the threadgroup's operation at kernel.metal"):
        run(built, "some_of_them", 128)


def test_one_thread_alone() -> None:
    built = library("execution_thread")
    for layout in layouts():
        for kernel, factor in (("in_memory", 1), ("cooperative", 2)):
            found, expected = run(built, kernel, 1, checks=CHECKS, tensor_layout=layout)
            assert torch.equal(found, factor * expected), (layout, kernel)
