"""Calls of torch's attention that need gradients: which run here, their gradients and their memory. Those of
attention() are in tests/operators/test_attention*.py, with 16 bits, checkpoints and what is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import torch_fattn
from tests.conftest import counted_launches, needs_emulator
from tests.pytorch.test_sdpa import operands
from torch_fattn.integrations import diffusers

OURS = "FattnAttentionBackward"


@pytest.fixture(autouse=True)
def undone() -> Iterator[None]:
    torch_fattn.reset_report()
    yield
    torch_fattn.uninstall()


def leaves(tensors: list[Tensor]) -> list[Tensor]:
    return [t.detach().clone().requires_grad_() for t in tensors]


def gradients(attention: Callable[..., Tensor], tensors: list[Tensor], **options: Any) -> list[Tensor]:
    given = leaves(tensors)
    out = attention(*given, **options)
    factors = torch.randn(out.shape, generator=torch.Generator().manual_seed(7))
    (out * factors.to(out)).sum().backward()
    return [t.grad for t in given if t.grad is not None]


def assert_same(mine: list[Tensor], exact: list[Tensor], tolerance: float = 1e-5) -> None:
    assert len(mine) == len(exact) == 3
    for a, b in zip(mine, exact, strict=True):
        assert a.shape == b.shape and (a.cpu().double() - b).abs().max() <= tolerance * b.abs().max()


MASK = torch.rand(9, 9, generator=torch.Generator().manual_seed(2)) > 0.3
CALLS: dict[str, tuple[tuple[tuple[int, ...], ...], dict[str, Any]]] = {
    "plain": (((2, 4, 9, 16),) * 3, {}),
    "causal": (((2, 4, 9, 16), (2, 4, 12, 16), (2, 4, 12, 16)), {"is_causal": True}),
    "one row": (((2, 4, 1, 16), (2, 4, 12, 16), (2, 4, 12, 16)), {}),
    "scale": (((2, 4, 9, 16),) * 3, {"scale": 0.7}),
    "grouped heads": (((2, 4, 9, 16), (2, 2, 9, 16), (2, 2, 9, 16)), {"enable_gqa": True}),
    "padded heads": (((2, 4, 9, 20), (2, 4, 9, 20), (2, 4, 9, 13)), {}),
    "broadcast": (((2, 4, 9, 16), (1, 4, 9, 16), (2, 1, 9, 16)), {}),
    "three dimensions": (((4, 9, 16),) * 3, {"is_causal": True}),
    "two dimensions": (((9, 16),) * 3, {}),
    "mask": (((2, 4, 9, 16),) * 3, {"attn_mask": MASK}),
    "additive mask": (((2, 4, 9, 16),) * 3, {"attn_mask": torch.where(MASK, 0.5, -torch.inf)}),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("attention", [torch_fattn.sdpa, F.scaled_dot_product_attention])
def test_gradients(attention: Callable[..., Tensor], call: str) -> None:
    shapes, options = CALLS[call]
    tensors = operands(*shapes)
    # On the CPU, torch reads a float32 mask beside float64 queries as if it were float64.
    masks = {n: m if m.dtype == torch.bool else m.double() for n, m in options.items() if n == "attn_mask"}
    exact_options = options | masks
    exact = gradients(F.scaled_dot_product_attention, [t.cpu().double() for t in tensors], **exact_options)
    options = {n: v.to("mps") if isinstance(v, Tensor) else v for n, v in options.items()}
    torch_fattn.install(training="fused")
    with counted_launches() as launches:
        mine = gradients(attention, tensors, **options)
    assert_same(mine, exact)
    assert launches["fattn_prefill"] == 1 and torch_fattn.report().routed_by["training"] == 1
    assert torch_fattn.report().fell_back == 0


# ---- what remains torch's


def test_a_second_derivative_is_refused_with_a_way_out() -> None:
    torch_fattn.install(training="fused")
    query, key, value = leaves(operands())
    (first,) = torch.autograd.grad(
        F.scaled_dot_product_attention(query, key, value).square().sum(), query, create_graph=True
    )
    with pytest.raises(RuntimeError, match=r"no second derivative; use .*sdpa_kernel\(SDPBackend.MATH\)"):
        first.sum().backward()
    with sdpa_kernel(SDPBackend.MATH):
        out = F.scaled_dot_product_attention(query, key, value)
    (first,) = torch.autograd.grad(out.square().sum(), query, create_graph=True)
    first.sum().backward()


def test_diffusers_attention() -> None:
    """Its backend, whose tensors are `[B, L, H, D]`."""
    attention = diffusers._Attention(before=F.scaled_dot_product_attention)
    tensors = operands(*[(2, 9, 4, 16)] * 3)

    def exactly(*tensors: Tensor) -> Tensor:
        heads_first = (t.transpose(1, 2) for t in tensors)
        return F.scaled_dot_product_attention(*heads_first).transpose(1, 2)

    torch_fattn.install(training="fused")
    mine = gradients(attention, tensors)
    assert torch_fattn.report().routed_by["training"] == 1
    assert_same(mine, gradients(exactly, [t.cpu().double() for t in tensors]))


# ---- memory


LENGTH = 256


def planned_peak(heads: int, length: int, dtype: torch.dtype) -> tuple[int, int]:
    """The bytes that the backward of a call needs by its plan, and those of its operands. It needs the
    gradients of result and operands, scratch, lse, and the result in 32 bits."""
    query = torch.empty(1, heads, length, 64, dtype=dtype, device="meta")
    lse = torch.empty(1, heads, length, device="meta")
    plan = torch_fattn.explain("prefill_backward", query, None, query, query, query, None, lse)
    of_result = 4 * query.numel() + lse.nbytes
    return of_result + 4 * query.nbytes + plan.data["scratch_bytes"], 3 * query.nbytes


@needs_emulator
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_peak_of_a_step(dtype: torch.dtype) -> None:
    """The backward needs what its plan says, and the composite implementation several matrices of scores."""
    import softmetal

    tensors = leaves(operands(*[(1, 2, LENGTH, 64)] * 3, dtype=dtype))
    planned, of_operands = planned_peak(2, LENGTH, dtype)
    matrix = 4 * 2 * LENGTH * LENGTH
    peaks = []
    for training in ("fused", "off"):
        torch_fattn.install(training=training)  # type: ignore[arg-type]
        with softmetal.peak_memory() as peak:
            F.scaled_dot_product_attention(*tensors).sum().backward()
        peaks.append(peak.bytes)
        for tensor in tensors:
            tensor.grad = None
    assert planned <= peaks[0] <= planned + 64 < 3 * of_operands
    assert peaks[1] > 2 * matrix, "the control"
