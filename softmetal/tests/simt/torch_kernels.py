"""The attention kernels in torch's wheel (PrefillAttention.h, DecodeAttention.h), launched as torch does."""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from softmetal.simt import Library

INCLUDE = Path(torch.__file__).parent / "include"
NAMES = {
    torch.float32: ("float32", "float"),
    torch.float16: ("float16", "half"),
    torch.bfloat16: ("bfloat16", "bfloat"),
}
PROLOGUE = """#include <metal_stdlib>
#include <metal_simdgroup>
#include <metal_simdgroup_matrix>
using namespace metal;
#include <c10/metal/common.h>
#include <c10/metal/utils.h>
"""
BARRIER = re.compile(r"threadgroup_barrier\([^)]*\);")


def header(name: str) -> str:
    return (INCLUDE / "ATen/native/mps/kernels" / f"{name}.h").read_text()


def library(text: str, only: str, mode: str = "fast") -> Library:
    return Library(PROLOGUE + text, mode=mode, include=[INCLUDE], only=only)


def without_barrier(text: str, index: int) -> str:
    """The text with its barrier number `index` blanked; lines stay where they are."""
    barrier = list(BARRIER.finditer(text))[index]
    return text[: barrier.start()] + " " * len(barrier.group()) + text[barrier.end() :]


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape).to(dtype)


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    mask = torch.ones(q.shape[2], k.shape[2]).tril().bool() if causal else None
    return F.scaled_dot_product_attention(q.float(), k.float(), v.float(), attn_mask=mask, enable_gqa=True)


def uints(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}I", *values)


class Problem:
    """Queries, keys, values and an output full of NaN."""

    def __init__(
        self,
        batch: int,
        heads: int,
        kv_heads: int,
        queries: int,
        keys: int,
        dim: int,
        causal: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        torch.manual_seed(queries * 1009 + keys)
        self.q = random(batch, heads, queries, dim, dtype=dtype)
        self.k = random(batch, kv_heads, keys, dim, dtype=dtype)
        self.v = random(batch, kv_heads, keys, dim, dtype=dtype)
        self.out = torch.full_like(self.q, float("nan"))
        self.causal = causal
        self.scale = dim**-0.5
        self.group = heads // kv_heads

    def error(self) -> float:
        return (self.out.float() - reference(self.q, self.k, self.v, self.causal)).abs().max().item()

    def run_prefill(self, library: Library, **options: Any) -> dict:
        batch, heads, queries, dim = self.q.shape
        strides = [s for t in (self.q, self.k, self.v, self.out) for s in t.stride()[:3]]
        sizes = (batch, heads, dim, queries, self.k.shape[2], self.group)
        # The strides of PrefillAttnParams are 32 bits wide in torch 2.13.
        kind = "q" if "int64_t Q_strides[3]" in header("PrefillAttention") else "i"
        parameters = struct.pack(f"<6i2f12{kind}", *sizes, self.scale, 1.0, *strides)
        block = 32 if dim < 128 else 16
        name = (
            f"prefill_attention_{NAMES[self.q.dtype][0]}_bq32_bk{block}_bd{dim}_wm4_wn1_hm0_dc{int(self.causal)}"
            f"_mask{NAMES[self.q.dtype][0]}"
        )
        buffers = [self.q, self.k, self.v, self.out, parameters, bytes(16), None]
        grid = ((queries + 31) // 32, heads, batch)
        return library.pipeline(name).run(buffers, grid, (32, 4, 1), **options)

    def decode_arguments(self) -> tuple[str, list, tuple[int, int, int]]:
        batch, heads, queries, dim = self.q.shape
        name = f"{NAMES[self.q.dtype][1]}_{dim}_{dim}_masknone{'_causal' if self.causal else ''}"
        by_axis = [uints(*(t.stride(axis) for t in (self.q, self.k, self.v)), 0) for axis in (1, 2)]
        by_batch = uints(*(t.stride(0) for t in (self.q, self.k, self.v)), heads)
        arguments = [uints(self.group), uints(self.k.shape[2]), *by_axis, struct.pack("<f", self.scale), None]
        return name, [*arguments, bytes(16), by_batch], (batch * heads, queries, 1)

    def run_decode(self, library: Library, **options: Any) -> dict:
        name, arguments, grid = self.decode_arguments()
        buffers = [self.q, self.k, self.v, self.out, *arguments]
        return library.pipeline(f"sdpa_vector_{name}").run(buffers, grid, (1024, 1, 1), **options)

    def run_decode_in_two_passes(self, library: Library, **options: Any) -> None:
        name, arguments, grid = self.decode_arguments()
        dtype, dim = NAMES[self.q.dtype][1], self.q.shape[3]
        count = grid[0] * grid[1] * 32
        partial = torch.full((count * dim,), float("nan"), dtype=self.q.dtype)
        sums, maxima = torch.full((count,), float("nan")), torch.full((count,), float("nan"))
        buffers = [self.q, self.k, self.v, partial, sums, maxima, *arguments]
        first = library.pipeline(f"sdpa_vector_2pass_1_{name}")
        first.run(buffers, (grid[0], grid[1], 32), (256, 1, 1), **options)
        second = library.pipeline(f"sdpa_vector_2pass_2_{dtype}_{dim}")
        second.run([partial, sums, maxima, self.out], grid, (1024, 1, 1), **options)
