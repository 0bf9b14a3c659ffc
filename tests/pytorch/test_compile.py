"""Graphs of torch.compile: lengths that change, gradients that refuse aloud. Every operator has opcheck."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

import torch_fattn
from tests.helpers.operator_calls import Sizes, operator_call
from torch_fattn.flash_attn import flash_attn_varlen_func

PACKED = ("paged_prefill", "varlen_prefill")
OPS = ("prefill", "decode", "paged_decode", *PACKED, "merge")


def arguments_of(op: str, device: str) -> dict[str, Any]:
    return operator_call(op, Sizes(batch=2, heads=2, rows=5, keys=32, block=16), device, "auto")


@pytest.mark.host_only
@pytest.mark.parametrize("op", (*PACKED, "varlen_attention", "flash_attn"))
def test_lengths_do_not_compile_again(op: str) -> None:
    """The bounds of packed calls, and where their rows are, differ from batch to batch."""
    arguments = arguments_of(op if op == "paged_prefill" else "varlen_prefill", "cpu")
    names = ("query", "key", "value", "cu_seqlens_q", "cu_seqlens_k")
    operands = [arguments[name] for name in names if name in arguments]
    bounds = [name for name in arguments if name.startswith("max_seqlen")]
    counter = CompileCounter()

    def model(most: int) -> Tensor:
        if op == "flash_attn":
            return flash_attn_varlen_func(*operands, most, most)
        offset = {} if op == "paged_prefill" else {"q_offset": most - 9}
        return getattr(torch.ops.fattn, op)(**arguments | dict.fromkeys(bounds, most) | offset)[0]

    torch.compiler.reset()
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=True)
    for most in range(9, 20):
        assert torch.equal(compiled(most), model(most))
    assert counter.frame_count == 1


@pytest.mark.parametrize("op", OPS)
def test_a_graph_has_no_gradient(op: str) -> None:
    arguments = arguments_of(op, "mps")
    first = "outs" if op == "merge" else "query"
    arguments[first] = arguments[first].clone().requires_grad_()

    def model(**arguments: Any) -> Tensor:
        arguments[first] = arguments[first] * 1.5
        out, lse = getattr(torch_fattn, op)(**arguments, return_lse=True)
        return out + (lse.mT if op in PACKED else lse)[..., None].exp()

    torch.compiler.reset()
    result = torch.compile(model, backend="aot_eager", fullgraph=True)(**arguments)
    assert torch.equal(result.detach().cpu(), model(**arguments).detach().cpu())
    with pytest.raises(RuntimeError, match="no backward.*scaled_dot_product_attention"):
        result.sum().backward()
