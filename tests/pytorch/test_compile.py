"""The ops as PyTorch sees them: opcheck, torch.compile without a graph break, gradients that refuse aloud."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

import torch_fattn
from tests.helpers import backward_problems, problems
from tests.helpers.backward_problems import BackwardProblem
from tests.helpers.problems import Problem
from torch_fattn.flash_attn import flash_attn_varlen_func
from torch_fattn.operators import BACKWARDS

PACKED = ("paged_prefill", "varlen_prefill")
OPS = ("prefill", "decode", "paged_decode", *PACKED, "merge")


def arguments_of(op: str, device: str, **changes: Any) -> dict[str, Any]:
    if op == "merge":
        generator = torch.Generator().manual_seed(0)
        return {
            "outs": torch.randn(2, 1, 4, 3, 16, generator=generator).to(device),
            "lses": torch.randn(2, 1, 4, 3, generator=generator).to(device),
        }
    forward = op.removesuffix("_backward")
    sizes: dict[str, Any] = {"q_len": 6, "kv_len": 20, "causality": "bottom_right", "mask": torch.bool}
    if forward != "prefill":
        sizes = {"q_len": 2, "kv_len": 32, "seq_lens": (21, 32)}
    if forward in PACKED:
        sizes |= {"q_lens": (1, 9), "q_len": 9, "causality": "bottom_right"}
    if op.startswith("paged"):
        sizes |= {"block_size": 16}
    problem = Problem(0, forward, torch.float32, 2, 4, 2, head_dim=16, value_dim=16, **(sizes | changes))
    if op in BACKWARDS:
        return backward_problems.build(BackwardProblem(0, problem, grad_lse=True)).arguments(device)[0]
    return problems.build(problem).arguments(device)[0]


@pytest.mark.parametrize("device", ["mps", "cpu", "meta"])
@pytest.mark.parametrize("op", (*OPS, *BACKWARDS))
def test_opcheck(op: str, device: str) -> None:
    if device == "meta":
        arguments = arguments_of(op, "cpu")
        on_meta = {n: a.to("meta") if isinstance(a, Tensor) else a for n, a in arguments.items()}
        real = getattr(torch.ops.fattn, op)(**arguments)
        fake = getattr(torch.ops.fattn, op)(**on_meta)
        for a, b in zip(real, fake, strict=True):
            assert a.shape == b.shape and a.dtype == b.dtype and a.stride() == b.stride()
        return
    arguments = arguments_of(op, device)
    schema = getattr(torch.ops.fattn, op).default._schema
    positional = tuple(arguments.pop(a.name, None) for a in schema.arguments if not a.kwarg_only)
    result = torch.library.opcheck(getattr(torch.ops.fattn, op).default, positional, arguments)
    assert set(result.values()) == {"SUCCESS"}


@pytest.mark.parametrize("op", (*OPS, *BACKWARDS))
def test_tags(op: str) -> None:
    assert torch.Tag.pt2_compliant_tag in getattr(torch.ops.fattn, op).default.tags


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


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("op", OPS)
def test_compile_without_graph_break(op: str, dynamic: bool, grad: bool) -> None:
    arguments = arguments_of(op, "mps")
    first = next(iter(arguments))
    arguments[first] = arguments[first].clone().requires_grad_(grad)

    def model(**arguments: Any) -> Tensor:
        arguments[first] = arguments[first] * 1.5
        out, lse = getattr(torch_fattn, op)(**arguments, return_lse=True)
        return out + (lse.mT if op in PACKED else lse)[..., None].exp()

    torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    with torch.set_grad_enabled(grad):
        result, plain = compiled(**arguments), model(**arguments)
    assert torch.equal(result.detach().cpu(), plain.detach().cpu())
    if grad:
        with pytest.raises(RuntimeError, match="no backward.*scaled_dot_product_attention"):
            result.sum().backward()


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("op", BACKWARDS)
def test_the_backwards_compile_without_graph_break(op: str, dynamic: bool, device: str) -> None:
    arguments = arguments_of(op, device, sinks=True)
    function = getattr(torch_fattn, op)
    torch.compiler.reset()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for traced, plain in zip(compiled(**arguments), function(**arguments), strict=True):
        assert (traced is None and plain is None) or torch.equal(traced, plain)
