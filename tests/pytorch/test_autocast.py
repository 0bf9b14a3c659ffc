"""Under torch.autocast the ops cast query, key and value as F.scaled_dot_product_attention does. All of them
are in tests/operators/test_every_operator.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import torch_fattn
from torch_fattn.flash_attn import flash_attn_func

fattn = torch.ops.fattn
HALVES = [torch.float16, torch.bfloat16]
DEVICES = ["mps", "cpu"]
SHARED = [(2, 4, 1, 16), (1, 2, 30, 16), (2, 2, 9, 16)]


def operands(device: str, *dtypes: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 2, 9, 16, generator=generator).to(device, dtype) for dtype in dtypes]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("to", HALVES, ids=str)
@pytest.mark.parametrize("given", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_mixed_dtypes(given: torch.dtype, to: torch.dtype, device: str) -> None:
    mixed = operands(device, given, torch.float32, torch.bfloat16)
    with torch.autocast(device, dtype=to):
        out, lse = fattn.prefill(*mixed)
        theirs = F.scaled_dot_product_attention(*mixed)
    assert out.dtype == theirs.dtype == to and lse.dtype == torch.float32
    plain, plain_lse = fattn.prefill(*(t.to(to) for t in mixed))
    assert torch.equal(out.cpu(), plain.cpu()) and torch.equal(lse.cpu(), plain_lse.cpu())


@pytest.mark.parametrize("device", DEVICES)
def test_without_autocast_they_raise(device: str) -> None:
    """The control; a disabled region is as none."""
    mixed = operands(device, torch.float16, torch.float32, torch.float32)
    for enabled in (None, False):
        context: Any = torch.autocast(device, dtype=torch.float16, enabled=bool(enabled))
        with context, pytest.raises(TypeError, match="all three must have the same dtype"):
            fattn.prefill(*mixed)


@pytest.mark.parametrize("device", DEVICES)
def test_calls_composed_of_parts(device: str) -> None:
    generator = torch.Generator().manual_seed(1)
    query, prefix, own = (torch.randn(shape, generator=generator).to(device) for shape in SHARED)

    def calls(query: Tensor, prefix: Tensor, own: Tensor) -> list[Tensor]:
        shared = torch_fattn.shared_prefix_decode(query, prefix, prefix, own, own)
        slopes = torch.ones(own.shape[2], device=device)
        return [shared, flash_attn_func(own, own, own, alibi_slopes=slopes)]

    with torch.autocast(device, dtype=torch.float16):
        results = calls(query, prefix, own)
    for out, plain in zip(results, calls(query.half(), prefix.half(), own.half()), strict=True):
        assert out.dtype == torch.float16 and torch.equal(out.cpu(), plain.cpu())


@pytest.mark.parametrize("device", DEVICES)
def test_a_float_mask_keeps_its_dtype(device: str) -> None:
    """-1e5 and -2e5 are both -inf in float16, and their sums with a score are good to 1/128 in float32."""
    query, key, value = operands(device, *[torch.float32] * 3)
    mask = torch.where(torch.arange(9) < 4, -1e5, -2e5).to(device)
    with torch.autocast(device, dtype=torch.float16):
        out, lse = fattn.prefill(query, key, value, mask)
    exact, _ = fattn.prefill(query.half(), key.half(), value.half(), (torch.arange(9) < 4).to(device))
    assert torch.allclose(out.cpu(), exact.cpu(), atol=3e-2)
    assert lse.max() < -9e4


def test_explain_shows_what_would_run() -> None:
    mixed = operands("mps", torch.float32, torch.float16, torch.bfloat16)
    with pytest.raises(TypeError, match="all three must have the same dtype"):
        torch_fattn.explain("prefill", *mixed)
    with torch.autocast("mps", dtype=torch.float16):
        shown = torch_fattn.explain("prefill", *mixed)
    assert shown.json == torch_fattn.explain("prefill", *(t.half() for t in mixed)).json


def test_compiled() -> None:
    query, key, value = operands("mps", torch.float32, torch.float16, torch.float32)

    def model(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with torch.autocast("mps", dtype=torch.float16):
            return fattn.prefill(query, key, value)[0]

    torch.compiler.reset()
    out = torch.compile(model, backend="aot_eager", fullgraph=True)(query, key, value)
    assert out.dtype == torch.float16
    assert torch.equal(out.cpu(), model(query, key, value).cpu())
