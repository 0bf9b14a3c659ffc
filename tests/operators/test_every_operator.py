"""What holds of every operator, in every cache format: empty calls, and how torch sees a call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conftest import counted_launches
from tests.helpers.operator_calls import OPERATORS, SIZES, operator_call, public_operators, written_by
from tests.helpers.tensors import same_bits, tensors_in
from torch_fattn.operators import ATTENTION, BACKWARDS, DIFFERENTIABLE


def call(op: str, arguments: dict[str, Any]) -> list[Tensor]:
    """The results and what is written."""
    found = getattr(torch.ops.fattn, op)(**arguments)
    return [*tensors_in(found), *(arguments[name] for name in written_by(op) if name in arguments)]


@pytest.mark.parametrize("size", ["no keys", "no rows", "no batch", "no heads"])
@pytest.mark.parametrize("op", public_operators())
def test_empty_calls(op: str, size: str, device: str) -> None:
    """Empty results launch nothing. A row without keys has a result of 0, and its sink as lse."""
    arguments = operator_call(op, SIZES[size], device, "auto")
    with counted_launches() as launches:
        results = call(op, arguments)
    assert launches == {} or any(result.numel() for result in results)
    for result, on_meta in zip(results, call(op, on("meta", arguments)), strict=True):
        assert result.shape == on_meta.shape and result.dtype == on_meta.dtype
    if op in BACKWARDS:
        assert not any(gradient.any() for gradient in results[:3])
    elif op in ATTENTION and size == "no keys":
        for sinks in (arguments["sinks"], None):
            out, lse = call(op, arguments | {"sinks": sinks})
            logits = torch.full((1,), -torch.inf) if sinks is None else sinks.cpu()
            assert not out.any() and torch.allclose(lse.cpu().flatten(), logits)


def on(device: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: each.to(device) if isinstance(each, Tensor) else each for name, each in arguments.items()}


@pytest.mark.parametrize(("op", "kv_format"), OPERATORS)
def test_opcheck_and_compile(op: str, kv_format: str, device: str) -> None:
    function = getattr(torch.ops.fattn, op)
    assert torch.Tag.pt2_compliant_tag in function.default.tags
    arguments = operator_call(op, SIZES["twos"], device, kv_format)
    if op in ("prefill", "decode", "paged_decode") and kv_format == "auto":
        arguments["token_major_out"] = True
    for dynamic in (False, True):
        mine, copy = (
            {n: a.clone() if n in written_by(op) else a for n, a in arguments.items()} for _ in "ab"
        )
        torch.compiler.reset()
        compiled = torch.compile(
            lambda **a: function(**a), backend="aot_eager", fullgraph=True, dynamic=dynamic
        )
        results = [*tensors_in(compiled(**copy)), *(copy[name] for name in written_by(op) if name in copy)]
        assert same_bits(results, call(op, mine))
    names = [a.name for a in function.default._schema.arguments if not a.kwarg_only]
    positional = tuple(arguments.pop(name) for name in names if name in arguments)
    assert set(torch.library.opcheck(function.default, positional, arguments).values()) == {"SUCCESS"}


@pytest.mark.parametrize(("op", "kv_format"), [each for each in OPERATORS if each[0] != "sdpa"])
def test_autocast(op: str, kv_format: str, device: str) -> None:
    """It casts the operands of attention, but no quantised cache, and leaves other operators alone."""
    arguments = operator_call(op, SIZES["twos"], device, kv_format)
    copy = {n: a.clone() if n in written_by(op) else a for n, a in arguments.items()}
    if op in (*ATTENTION, *DIFFERENTIABLE):
        names = ("query", "key", "value", "key_cache", "value_cache")
        copy |= {n: copy[n].half() for n in names if n in copy and copy[n].is_floating_point()}
    with torch.autocast(device, torch.float16):
        results = call(op, arguments)
    assert same_bits(results, call(op, copy))
