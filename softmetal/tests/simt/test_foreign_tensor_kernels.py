"""Kernels on tensor operations that other projects run on hardware: MLX's steel/attn, torch's MppAttention.h.

Both fill cooperative tensors slot by slot, by the layout of a GPU. They must be right under that layout, with
the checks quiet, and wrong under every other, which tests the layouts as well as the arithmetic.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tensor_programs import NAMES

from softmetal.testing import Library

CHECKS = "race,bounds,uninit"
TILE = (64, 32)  # rows and keys of one step, of both kernels
DIM = 64
DTYPES = (torch.float16, torch.bfloat16)
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
MLX = "mlx-metal==0.32.4"
MLX_SOURCE = """#include <metal_stdlib>
#include "mlx/backend/metal/kernels/utils.h"
#include "mlx/backend/metal/kernels/steel/attn/kernels/steel_attention_nax.h"
template [[host_name("k")]] [[kernel]]
  decltype(attention_nax<{type}, 64, 32, {dim}, {dim}, 4, 1, float, float>)
  attention_nax<{type}, 64, 32, {dim}, {dim}, 4, 1, float, float>;
"""
TORCH = "torch==2.15.0"
TORCH_HEADER = "ATen/native/mps/kernels/MppAttention.h"
TORCH_SOURCE = """#include <metal_stdlib>
using namespace metal;
#include <c10/metal/common.h>
#include <c10/metal/utils.h>
#include <ATen/native/mps/kernels/MppAttention.h>
"""


class Problem:
    """Two heads share one of the keys and values; rows are apart as after a projection."""

    def __init__(self, dtype: torch.dtype, q_len: int, kv_len: int) -> None:
        generator = torch.Generator().manual_seed(q_len)
        shapes = ((1, q_len, 2, DIM), (1, kv_len, 1, DIM), (1, kv_len, 1, DIM))
        self.dtype, self.q_len, self.kv_len = dtype, q_len, kv_len
        self.q, self.k, self.v = (
            torch.randn(shape, generator=generator).to(dtype).transpose(1, 2) for shape in shapes
        )
        self.out = torch.full_like(self.q, float("nan"))
        self.grid = (-(-q_len // TILE[0]), 2, 1)

    @property
    def sizes(self) -> tuple[int, ...]:  # B, H, D, qL, kL, heads of one key
        return (1, 2, DIM, self.q_len, self.kv_len, 2)

    @property
    def strides(self) -> bytes:
        return struct.pack(
            "<12q", *(s for one in (self.q, self.k, self.v, self.out) for s in one.stride()[:3])
        )

    def is_right(self, first_seen: int) -> bool:
        """Row i sees the keys up to i + first_seen."""
        q, k, v = (one.double() for one in (self.q, self.k, self.v))
        scores = q @ k.transpose(-1, -2) * DIM**-0.5
        rows, keys = torch.arange(self.q_len)[:, None], torch.arange(self.kv_len)
        weights = scores.masked_fill(keys > rows + first_seen, -torch.inf).softmax(-1)
        error = (self.out.double() - weights @ v).abs().max().item()
        return error <= TOLERANCE[self.dtype]  # false for NaN


def others(right: str) -> list[str]:
    seeds = [4 * random.randrange(1 << 20) + kind for kind in range(4)]
    return [one for one in ("m5", "blocks8", *(f"random:{seed}" for seed in seeds)) if one != right]


@pytest.fixture(scope="module")
def mlx(unpacked: Callable[[str, str], Path]) -> Path:
    return unpacked(MLX, "mlx/include/mlx/backend/metal/kernels/") / "mlx/include"


@pytest.fixture(scope="module")
def torch_headers(unpacked: Callable[[str, str], Path]) -> Path:
    installed = Path(torch.__file__).parent / "include"
    if (installed / TORCH_HEADER).exists():
        return installed
    return unpacked(TORCH, "torch/include/") / "torch/include"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mlx(mlx: Path, dtype: torch.dtype) -> None:
    source = MLX_SOURCE.format(type=NAMES[dtype], dim=DIM)
    library = Library(source, include=[mlx], mode="checked", std="metal4.0")

    def run(layout: str, q_len: int, kv_len: int, checks: str = "") -> bool:
        problem = Problem(dtype, q_len, kv_len)
        whole = [length // unit for length, unit in zip((q_len, kv_len), TILE, strict=True)]
        rest = [length % unit for length, unit in zip((q_len, kv_len), TILE, strict=True)]
        steps = [full + (left > 0) for full, left in zip(whole, rest, strict=True)]
        parameters = struct.pack("<6if7i", *problem.sizes, DIM**-0.5, *steps, *whole, *rest, kv_len - q_len)
        is_aligned = [left == 0 for left in rest]
        constants = {200: is_aligned[0], 201: is_aligned[1], 300: False, 301: True, 302: False, 303: False}
        buffers = [problem.q, problem.k, problem.v, problem.out, parameters + problem.strides]
        library.pipeline("k", constants).run(
            buffers, problem.grid, (32, 4, 1), checks=checks, tensor_layout=layout
        )
        return problem.is_right(kv_len - q_len)

    for lengths in ((64, 64), (70, 93)):
        assert run("m5", *lengths, checks=CHECKS)
        for layout in others("m5"):
            assert not run(layout, *lengths), layout


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("generation", "right"), [("a10", "m5"), ("a9", "blocks8")])
def test_torch(torch_headers: Path, dtype: torch.dtype, generation: str, right: str) -> None:
    kind = {torch.float16: "float16", torch.bfloat16: "bfloat16"}[dtype]
    name = f"prefill_attention_mpp_{generation}_{kind}_bq64_bk32_bd{DIM}_wm4_wn1_hm0_dc1_mask{kind}"
    library = Library(TORCH_SOURCE, include=[torch_headers], mode="checked", std="metal4.0", only=f"^{name}$")

    def run(layout: str, length: int, checks: str = "") -> bool:
        problem = Problem(dtype, length, length)
        parameters = struct.pack("<6i2f", *problem.sizes, DIM**-0.5, 1.0) + problem.strides
        unmasked = [bytes(64), bytes(4)]
        buffers = [problem.q, problem.k, problem.v, problem.out, parameters, *unmasked]
        library.pipeline(name).run(buffers, problem.grid, (128, 1, 1), checks=checks, tensor_layout=layout)
        return problem.is_right(0)

    for length in (64, 77):
        assert run(right, length, checks=CHECKS)
        for layout in others(right):
            assert not run(layout, length), layout
