"""The checks see through matmul2d. Each finding has a control: the same kernel without the fault is quiet."""

from __future__ import annotations

import pytest
import torch
from tensor_programs import DYNAMIC, HALF_OPERANDS, PROLOGUE, Case, Product, layouts, library

from softmetal.testing import KernelError, Library

CHECKS = "race,bounds,uninit"
SOURCE = (
    PROLOGUE
    + HALF_OPERANDS
    + """
#define K 16
#define OPERANDS                                                                              \\
  constexpr auto of = matmul2d_descriptor(16, 32, K, false, false, false,                     \\
                                          matmul2d_descriptor::mode::MODE);                   \\
  matmul2d<of, execution_simdgroup> multiply;                                                 \\
  Operand left(a, dextents<int, 2>(LEFT_COLUMNS, 16)), right(b, dextents<int, 2>(32, RIGHT_ROWS)); \\
  Result out(c, dextents<int, 2>(32, 16));
#define ARGUMENTS                                                                             \\
  device half *a [[buffer(0)]], device half *b [[buffer(1)]], device float *c [[buffer(2)]],   \\
      ushort lane [[thread_index_in_simdgroup]], ushort group [[simdgroup_index_in_threadgroup]]

kernel void in_device(ARGUMENTS) {
  OPERANDS
  multiply.run(left, right, out);
}

// The left operand is copied to threadgroup memory by the lanes, which multiply, and then overwrite it.
kernel void in_threadgroup(ARGUMENTS) {
  OPERANDS
  threadgroup half tile[16 * 16];
  Shared copy(tile, dextents<int, 2>(16, 16));
  for (int i = lane; i < COPIED; i += 32) tile[i] = a[i];
  BEFORE
  multiply.run(copy, right, out);
  AFTER
  for (int i = lane; i < 16 * 16; i += 32) tile[i] = 0;
}

// Two simdgroups write the same result.
kernel void twice(ARGUMENTS) {
  OPERANDS
  Result mine(c + group * FAR, dextents<int, 2>(32, 16));
  multiply.run(left, right, mine);
}

// A lane reads what matmul2d has written.
kernel void written(ARGUMENTS) {
  OPERANDS
  multiply.run(left, right, out);
  AFTER
  if (lane == 5) c[512] = c[5] + c[511];
}

kernel void accumulated(ARGUMENTS) {
  OPERANDS
  auto sums = multiply.get_destination_cooperative_tensor<Operand, Operand, float>();
  for (ushort i = 0; i < sums.get_capacity(); ++i)
    if (CLEARED) sums[i] = 0;
  multiply.run(left, right, sums);
  sums.store(out);
}

kernel void unwritten(ARGUMENTS) {
  OPERANDS
  auto sums = multiply.get_destination_cooperative_tensor<Operand, Operand, float>();
  if (CLEARED) multiply.run(left, right, sums);
  c[lane] = sums[1];
}

kernel void past_the_capacity(ARGUMENTS) {
  OPERANDS
  auto sums = multiply.get_destination_cooperative_tensor<Operand, Operand, float>();
  multiply.run(left, right, sums);
  c[lane] = sums[SLOT];
}

kernel void inner_stride(ARGUMENTS) {
  OPERANDS
  Operand spread(a, dextents<int, 2>(16, 16), array<int, 2>{STRIDE, 16});
  Result result(c, dextents<int, 2>(32, 16), array<int, 2>{RESULT_STRIDE, 32});
  multiply.run(spread, right, result);
}

kernel void part(ARGUMENTS) {
  OPERANDS
  auto slice = left.slice<16, 16>(COLUMN, 0);
  multiply.run(slice, right, out);
}
"""
)
QUIET = {
    "MODE": "multiply", "LEFT_COLUMNS": 16, "RIGHT_ROWS": 16, "COPIED": 256, "CLEARED": "true", "FAR": 512,
    "SLOT": 15, "STRIDE": 1, "RESULT_STRIDE": 1, "COLUMN": 0,
    "BEFORE": "simdgroup_barrier(mem_flags::mem_threadgroup);",
    "AFTER": "simdgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);",
}  # fmt: skip
FAULTS = {
    "device operand past its buffer": ("in_device", {}, (255, 512, 512), "bounds: .*read of .*buffer 0 'a'"),
    "result past its buffer": ("in_device", {}, (256, 512, 500), "bounds: .*write of .*buffer 2 'c'"),
    "no barrier before": ("in_threadgroup", {"BEFORE": ""}, None, "race: .*read of .*array 'tile'"),
    "no barrier behind": ("in_threadgroup", {"AFTER": ""}, None, "race: .*write of .*array 'tile'"),
    "half of the tile is filled": ("in_threadgroup", {"COPIED": 128}, None, "uninitialised: .*array 'tile'"),
    "two results in one place": ("twice", {"FAR": 0}, None, "race: .*write of .*buffer 2 'c'"),
    "result read at once": ("written", {"AFTER": ""}, None, "race: .*read of 4 bytes .*buffer 2 'c'"),
    "accumulator not cleared": (
        "accumulated", {"MODE": "multiply_accumulate", "CLEARED": "false"}, None, "uninitialised: .*'sums'"),
    "element without a value": ("unwritten", {"CLEARED": "false"}, None, "uninitialised: .*'sums'"),
    "slot past the capacity": (
        "past_the_capacity", {"SLOT": 16}, None,
        "bounds: .*index 16 of a cooperative tensor, where it has 16 elements"),
}  # fmt: skip
# Errors without any check, too.
MISUSES = {
    "left operand shorter than K": (
        "in_device", {"LEFT_COLUMNS": 12}, "multiplies 16 along K, but its left operand has 12"),
    "right operand shorter than K": (
        "in_device", {"RIGHT_ROWS": 15}, "multiplies 16 along K, but its right operand has 15"),
    "slice that promises more than there is": (
        "part", {"COLUMN": 4}, "multiplies 16 along K, but its left operand has 12"),
    "inner stride": ("inner_stride", {"STRIDE": 2}, "elements 2 apart in its inner dimension"),
    "inner stride of the result": (
        "inner_stride", {"RESULT_STRIDE": 3}, "elements 3 apart in its inner dimension"),
}  # fmt: skip


def run(
    kernel: str, faults: dict[str, object], sizes: tuple[int, int, int] | None = None, checks: str = CHECKS,
    layout: str = "m5", order: str = "forward",
) -> torch.Tensor:  # fmt: skip
    defines = {**QUIET, **faults}
    mode = "checked" if checks else "fast"
    built = Library(SOURCE, defines=defines, mode=mode, std="metal4.0", only=f"^{kernel}$")
    a, b, c = sizes or (512, 512, 1024)
    buffers = [torch.ones(a).half(), torch.ones(b).half(), torch.zeros(c)]
    threads = 64 if kernel == "twice" else 32
    built.pipeline(kernel).run(
        buffers, (1, 1, 1), (threads, 1, 1), checks=checks, tensor_layout=layout, order=order
    )
    return buffers[2]


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_found(fault: str) -> None:
    kernel, faults, sizes, finding = FAULTS[fault]
    for order in ("forward", "reverse"):
        run(kernel, {"MODE": faults.get("MODE", "multiply")}, order=order)
        with pytest.raises(KernelError, match=finding) as caught:
            run(kernel, faults, sizes, order=order)
        assert "kernel.metal:" in str(caught.value)


@pytest.mark.parametrize("misuse", MISUSES)
def test_misuse_ends_the_dispatch(misuse: str) -> None:
    kernel, faults, message = MISUSES[misuse]
    for checks in ("", CHECKS):
        run(kernel, {}, checks=checks)
        with pytest.raises(KernelError, match=f"tensor: kernel '{kernel}': .*{message}.*kernel.metal:"):
            run(kernel, faults, checks=checks)


def test_new_tensors_hold_nan() -> None:
    assert run("unwritten", {"CLEARED": "false"}, checks="")[:32].isnan().all()
    assert run("unwritten", {}, checks="")[:32].tolist() == [16.0] * 32


def test_quiet_under_all_checks() -> None:
    product = Product(torch.float16, torch.float16, torch.float32, 16, 32, DYNAMIC, add=True)
    checked = library([product], mode="checked")
    for layout in layouts():
        for order in ("forward", "reverse", "random:3"):
            case = Case(product, 15, 31, 24)
            case.run(checked, checks=CHECKS, tensor_layout=layout, order=order)
            case.assert_right(f"{layout}, {order}")


def test_counts() -> None:
    """Products as 8x8x8 ones, beside those of simdgroup_matrix; each operand is read once."""
    product = Product(torch.float16, torch.bfloat16, torch.float32, 16, 32, DYNAMIC, in_memory=True)
    checked = library([product], mode="checked")
    for m, n, k in ((16, 32, 24), (15, 31, 20)):
        counters = Case(product, m, n, k).run(checked, checks="bytes,distinct")
        assert counters["tensor_products"] == 2 * 4 * 3
        assert counters["products"] == 0
        read, written = counters["buffers_read"], counters["buffers_written"]
        assert (read[0], read[1]) == (2 * m * k, 2 * k * n)
        assert written == {2: 4 * m * n}
        assert counters["buffers_distinct"][0] == 2 * m * k
    added = Product(torch.float16, torch.bfloat16, torch.float32, 16, 32, 16, add=True, in_memory=True)
    counters = Case(added, 16, 32, 16).run(library([added], mode="checked"), checks="bytes")
    assert counters["buffers_read"][2] == counters["buffers_written"][2] == 4 * 16 * 32
