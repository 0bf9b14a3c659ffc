"""Products of matmul2d as Metal programs, their operands, and what they should be."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from softmetal.testing import Library

PROLOGUE = """#include <metal_stdlib>
#include <metal_tensor>
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
using namespace metal;
using namespace mpp::tensor_ops;
"""
# Half operands in both memories, and a float result.
HALF_OPERANDS = """
typedef tensor<device half, dextents<int, 2>, tensor_inline> Operand;
typedef tensor<threadgroup half, dextents<int, 2>, tensor_inline> Shared;
typedef tensor<device float, dextents<int, 2>, tensor_inline> Result;
"""
# The extents and the row stride of each operand come with the call.
PRODUCT = """
struct Sizes { int columns, rows, stride; };
template <class T>
using Matrix = tensor<device T, dextents<int, 2>, tensor_inline>;
template <class T>
Matrix<T> over(device T* data, constant Sizes& s) {
  return Matrix<T>(data, dextents<int, 2>(s.columns, s.rows), array<int, 2>{1, s.stride});
}

template <class A, class B, class C, int M, int N, int K, bool TL, bool TR, bool RELAXED, bool ADD,
          bool IN_MEMORY>
kernel void product(device A* a [[buffer(0)]], device B* b [[buffer(1)]], device C* c [[buffer(2)]],
                    constant Sizes* sizes [[buffer(3)]]) {
  constexpr auto mode =
      ADD ? matmul2d_descriptor::mode::multiply_accumulate : matmul2d_descriptor::mode::multiply;
  constexpr auto of = matmul2d_descriptor(M, N, K, TL, TR, RELAXED, mode);
  matmul2d<of, execution_simdgroup> multiply;
  Matrix<A> left = over(a, sizes[0]);
  Matrix<B> right = over(b, sizes[1]);
  Matrix<C> out = over(c, sizes[2]);
  if (IN_MEMORY) {
    multiply.run(left, right, out);
  } else {
    auto sums = multiply.template get_destination_cooperative_tensor<Matrix<A>, Matrix<B>, C>();
    if (ADD) sums.load(out);
    multiply.run(left, right, sums);
    sums.store(out);
  }
}
"""
NAMES = {
    torch.float16: "half",
    torch.bfloat16: "bfloat",
    torch.float32: "float",
    torch.int8: "char",
    torch.int32: "int",
}
DYNAMIC = 0
_EXACT_BITS = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24, torch.int32: 31}
GUARD = 7  # an exact value of every type


@dataclass(frozen=True)
class Product:
    left: torch.dtype
    right: torch.dtype
    out: torch.dtype
    m: int
    n: int
    k: int  # DYNAMIC: the operands say it
    transposed: tuple[bool, bool] = (False, False)
    relaxed: bool = False
    add: bool = False
    in_memory: bool = False

    @property
    def name(self) -> str:
        types = "_".join(NAMES[dtype] for dtype in (self.left, self.right, self.out))
        flags = (*self.transposed, self.relaxed, self.add, self.in_memory)
        return f"{types}_{self.m}x{self.n}x{self.k}_" + "".join(str(int(flag)) for flag in flags)

    def instance(self) -> str:
        types = [NAMES[dtype] for dtype in (self.left, self.right, self.out)]
        k = str(self.k or "dynamic_length_v<int>")
        flags = [str(flag).lower() for flag in (*self.transposed, self.relaxed, self.add, self.in_memory)]
        kind = f"product<{', '.join([*types, str(self.m), str(self.n), k, *flags])}>"
        buffers = ", ".join(f"device {kind}*" for kind in types)
        return f'template [[host_name("{self.name}")]] kernel void {kind}({buffers}, constant Sizes*);\n'


def library(products: Sequence[Product], mode: str = "fast") -> Library:
    source = PROLOGUE + PRODUCT + "".join(one.instance() for one in products)
    return Library(source, std="metal4.0", mode=mode)


class Case:
    """Operands in rows that are longer than they, in buffers full of a guard value."""

    def __init__(self, product: Product, m: int, n: int, k: int, seed: int = 0) -> None:
        self.product, self.m, self.n, self.k = product, m, n, k
        generator = torch.Generator().manual_seed(seed)
        shapes = [
            (k, m) if product.transposed[0] else (m, k),
            (n, k) if product.transposed[1] else (k, n),
            (m, n),
        ]
        dtypes = (product.left, product.right, product.out)
        self.whole, self.operands = [], []
        for shape, dtype in zip(shapes, dtypes, strict=True):
            whole = torch.full((shape[0] + 2, shape[1] + 5), GUARD, dtype=dtype)
            part = whole[: shape[0], : shape[1]]
            values = torch.randint(-64, 65, shape, generator=generator)
            part.copy_(values if not dtype.is_floating_point else values / 32)
            self.whole.append(whole)
            self.operands.append(part)
        self.before = self.whole[2].clone()

    def expected(self) -> torch.Tensor:
        a, b = (one.double() for one in self.operands[:2])
        a = a.T if self.product.transposed[0] else a
        b = b.T if self.product.transposed[1] else b
        before = self.before[: self.m, : self.n].double() if self.product.add else 0
        return a @ b + before

    def run(self, library: Library, **options: Any) -> dict[str, Any]:
        sizes = b"".join(
            struct.pack("<3i", part.shape[1], part.shape[0], part.stride(0)) for part in self.operands
        )
        kernel = library.pipeline(self.product.name)
        return kernel.run([*self.operands, sizes], (1, 1, 1), (32, 1, 1), **options)

    def assert_right(self, note: str) -> None:
        """The values are those of float64, rounded once, and nothing else of the buffer has changed."""
        result, expected = self.operands[2].double(), self.expected()
        unit = 2.0 ** (1 - _EXACT_BITS[self.product.out])
        scale = expected.abs().clamp(min=1)
        cuts_floats = self.product.relaxed and torch.float32 in (self.product.left, self.product.right)
        relaxed = self.k * 4 * 2.0**-10 if cuts_floats else 0.0
        error = ((result - expected).abs() / (scale * unit + relaxed + self.k * 2.0**-20)).max().item()
        assert error <= 1, f"{self.product.name}, {note}: {error} of the tolerance"
        untouched = self.whole[2].clone()
        untouched[: self.m, : self.n] = self.before[: self.m, : self.n]
        assert torch.equal(untouched, self.before), f"{self.product.name}, {note}: outside the extents"


def layouts(fresh: int = 1) -> list[str]:
    """The known ones, and random ones of every kind, new in each run."""
    seeds = [4 * random.randrange(1 << 20) + kind for kind in range(4) for _ in range(fresh)]
    return ["m5", "blocks8", *(f"random:{seed}" for seed in seeds)]
