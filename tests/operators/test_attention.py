"""attention() and varlen_attention(): the results of the prefills, with gradients."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_fattn
from bench.cases.calls import REMAINDER_SCALE
from tests.conftest import Checked, counted_launches
from tests.helpers import accuracy, problems, small_problems
from tests.helpers.dense import dense_attention, dense_sequences
from torch_fattn import attention, varlen_attention

NAMES = ("query", "key", "value", "sinks", "alibi_slopes")

Operands = dict[str, Any]


def operands(device: str, dtype: torch.dtype = torch.float32, **more: Any) -> Operands:
    """Few rows and keys, of grouped heads whose values are wider than their keys."""
    generator = torch.Generator().manual_seed(0)
    sizes = {"query": (2, 4, 21, 16), "key": (2, 2, 29, 16), "value": (2, 2, 29, 24)}
    made = {n: torch.randn(size, generator=generator).to(dtype).to(device) for n, size in sizes.items()}
    return made | {n: v.to(device) if isinstance(v, Tensor) else v for n, v in more.items()}


def leaves(given: Operands) -> Operands:
    """The same with new leaves, which require gradients."""
    return {n: v.detach().clone().requires_grad_() if n in NAMES else v for n, v in given.items()}


def token_major(given: Operands) -> Operands:
    """The same in the layout of models, heads after rows in memory, and the result too."""
    views = {n: given[n].transpose(1, 2).contiguous().transpose(1, 2) for n in NAMES[:3]}
    return given | views | {"token_major_out": True}


def exactly(given: Operands) -> Operands:
    return {n: v.detach().cpu().double() if n in NAMES else on_cpu(v) for n, v in given.items()}


def on_cpu(value: Any) -> Any:
    return value.cpu() if isinstance(value, Tensor) else value


def gradients(function: Callable[..., Any], given: Operands, with_lse: bool = True) -> dict[str, Tensor]:
    """Sums the results with fixed factors, and differentiates that."""
    given = leaves(given)
    out, lse = function(**given)
    generator = torch.Generator().manual_seed(7)
    total = (out * torch.randn(out.shape, generator=generator).to(out)).sum()
    if with_lse:
        total = total + (lse * torch.randn(lse.shape, generator=generator).to(lse)).sum()
    total.backward()
    return {n: v.grad for n, v in given.items() if n in NAMES}


def with_lse(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda **given: function(**given, return_lse=True)


def assert_same(mine: dict[str, Tensor], exact: dict[str, Tensor], tolerance: float) -> None:
    assert mine.keys() == exact.keys()
    for name, gradient in exact.items():
        error = (mine[name].cpu().double() - gradient.cpu()).abs().max()
        assert error <= tolerance * gradient.abs().max(), (name, error)


SLOPES = torch.tensor([0.5, 0.1, 0.03, 0.2])
MASK = torch.rand(2, 1, 21, 29, generator=torch.Generator().manual_seed(2)) > 0.4
OPTIONS: dict[str, dict[str, Any]] = {
    "dense": {},
    "causal": {"is_causal": True},
    "upper left": {"is_causal": True, "q_offset": 0},
    "window": {"is_causal": True, "window_left": 6, "sink_tokens": 2},
    "both windows": {"window_left": 5, "window_right": 3},
    "softcap": {"softcap": 2.0, "scale": 0.7},
    "sinks": {"is_causal": True, "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    "slopes": {"is_causal": True, "alibi_slopes": SLOPES},
    "slopes of sequences": {"alibi_slopes": torch.stack((SLOPES, -SLOPES))},
    "mask": {"attn_mask": MASK},
    "additive mask": {"attn_mask": torch.where(MASK, MASK.cumsum(-1) / 9, -torch.inf)},
    "rows without keys": {"is_causal": True, "q_offset": -5},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_gradients(options: dict[str, Any], device: str) -> None:
    given = operands(device, **options)
    has_empty_rows = options.get("q_offset", 0) < 0  # their lse is -inf, times a factor
    exact = gradients(dense_attention, exactly(given), not has_empty_rows)
    with counted_launches() as launches:
        mine = gradients(with_lse(attention), given, not has_empty_rows)
    assert_same(mine, exact, 1e-5)
    assert device == "cpu" or launches.get("fattn_prefill", 0) > 0
    plain = torch_fattn.prefill(**given, return_lse=True)
    for a, b in zip(attention(**leaves(given), return_lse=True), plain, strict=True):
        assert torch.equal(a.detach(), b), "the results of prefill, bit for bit"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_of_16_bits(dtype: torch.dtype, device: str) -> None:
    given = operands(device, dtype, is_causal=True, softcap=5.0)
    exact = gradients(dense_attention, exactly(given))
    mine = gradients(with_lse(attention), given)
    assert all(mine[n].dtype == dtype for n in mine)
    assert_same(mine, exact, 4 * torch.finfo(dtype).eps)


REMAINDERS = {  # by the kernels that store one
    ("fattn_prefill",): small_problems.problem("prefill", q_len=40, causality="bottom_right"),  # 3 see no key
    ("fattn_prefill_wide",): small_problems.problem("varlen_prefill", head_dim=192, spare_rows=2),
    ("fattn_prefill", "fattn_merge"): small_problems.problem("prefill", q_len=9, kv_len=900),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kernels", REMAINDERS)
def test_the_remainder_of_a_result(kernels: tuple[str, ...], dtype: torch.dtype, checked: Checked) -> None:
    """It takes away most of the error of out, which rounding made: the control."""
    seed = random.SystemRandom().randrange(2**32)
    case = problems.build(replace(REMAINDERS[kernels], dtype=dtype), seed)
    op = torch.ops.fattn.varlen_attention if case.problem.q_lens else torch.ops.fattn.attention
    with checked(), counted_launches() as launches:
        out, _lse, remainder = (each.cpu().double() for each in op.with_remainder(**case.arguments("mps")[0]))
    assert launches == dict.fromkeys(kernels, 1)
    exact = accuracy.expected(case)
    wanted = (accuracy.packed(case, *exact) if case.problem.q_lens else exact)[0]
    error, rounded = ((each - wanted).abs().max() for each in (out + remainder / REMAINDER_SCALE, out))
    assert error <= rounded / 32 and rounded < torch.finfo(dtype).eps * wanted.abs().max(), seed


@pytest.mark.parametrize("name", [name for name, each in problems.OPTIONS.items() if "prefill" in each.ops])
def test_an_option_has_gradients(name: str, device: str) -> None:
    option = problems.OPTIONS[name]
    value = next(value for value in reversed(option.values) if value != option.values[0])
    problem = problems.Problem(0, "prefill", torch.float32, 2, 4, 2, 21, 29, 16, 24, **{name: value})
    given = operands(device, **problem.numbers, **problem.tensors(torch.Generator().manual_seed(0)))
    assert gradients(with_lse(attention), given)["query"].isfinite().all()


def test_gradients_in_token_major_layout(device: str) -> None:
    given = operands(device, is_causal=True)
    mine = gradients(with_lse(attention), token_major(given))
    assert_same(mine, gradients(dense_attention, exactly(given)), 1e-5)


def test_a_mask_map(device: str) -> None:
    """It changes no bit, in the backward either."""
    given = operands(device, attn_mask=MASK)
    with_map = {**given, "mask_map": torch_fattn.mask_map(given["attn_mask"])}
    mine, plain = (gradients(with_lse(attention), each) for each in (with_map, given))
    assert all(torch.equal(mine[n], plain[n]) for n in mine)


def test_results_without_a_backward_are_freed(device: str) -> None:
    given = leaves(operands(device))
    out = attention(**given)
    freed = weakref.ref(out)
    del out
    gc.collect()
    assert freed() is None


CU_Q, CU_K = torch.tensor([0, 5, 5, 19], dtype=torch.int32), torch.tensor([0, 9, 13, 13], dtype=torch.int32)


def packed(device: str) -> Operands:
    """Three sequences, of which one has no row and one no key; two rows belong to none."""
    generator = torch.Generator().manual_seed(0)
    sizes = {"query": (21, 4, 16), "key": (15, 2, 16), "value": (15, 2, 24)}
    given: Operands = {n: torch.randn(size, generator=generator).to(device) for n, size in sizes.items()}
    given |= {"cu_seqlens_q": CU_Q.to(device), "cu_seqlens_k": CU_K.to(device)}
    return given | {"max_seqlen_q": 14, "max_seqlen_k": 9}


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"window_left": 2, "window_right": 1}])
def test_gradients_of_packed_sequences(options: dict[str, Any], device: str) -> None:
    given = packed(device) | options
    exact = gradients(dense_sequences, exactly(given), with_lse=False)
    mine = gradients(with_lse(varlen_attention), given, with_lse=False)
    assert_same(mine, exact, 1e-5)
    assert not mine["query"][19:].any() and not mine["key"][13:].any(), "of no sequence"
    plain = torch_fattn.varlen_prefill(**given)
    assert torch.equal(varlen_attention(**leaves(given)).detach(), plain)
    shorter = given | {"max_seqlen_q": 3, "max_seqlen_k": 2}
    again = gradients(with_lse(varlen_attention), shorter, with_lse=False)
    assert all(torch.equal(again[name], mine[name]) for name in mine), "bounds that are too small"


def kept_by(call: Callable[[], Any]) -> list[Tensor]:
    """The tensors that autograd keeps for the backward of a call."""
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        call()
    return kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kept_tensors(dtype: torch.dtype, device: str) -> None:
    """The operands, lse and out; on the GPU the remainder of a rounded out, elsewhere not even that. Never a
    score."""
    given = leaves(operands(device, dtype, is_causal=True))
    kept = kept_by(lambda: attention(**given))
    shapes = [tuple(t.shape) for t in kept]
    wanted = [tuple(given[n].shape) for n in NAMES[:3]]
    out, lse = (2, 4, 21, 24), (2, 4, 21)
    wanted += [out, lse] if dtype == torch.float32 else [out, lse, out] if device == "mps" else [lse]
    assert shapes == wanted and all(t.dtype in (dtype, torch.float32) for t in kept)
    composite = kept_by(lambda: dense_attention(**given))
    assert any(t.shape[-2:] == (21, 29) for t in composite), "the control"


def test_nothing_is_kept_without_gradients(device: str) -> None:
    given = operands(device)
    assert not kept_by(lambda: attention(**given))
    with torch.no_grad():
        assert not attention(**leaves(given)).requires_grad


def test_memory_is_freed_by_the_backward(device: str) -> None:
    given = leaves(operands(device))
    query = given["query"] * 1.0
    freed = weakref.ref(query)
    out = attention(**{**given, "query": query})
    del query
    gc.collect()
    assert freed() is not None, "the control"
    out.sum().backward()
    gc.collect()
    assert freed() is None
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        out.sum().backward()


def test_operands_that_have_changed_are_noticed(device: str) -> None:
    given = leaves(operands(device))
    scaled = given["query"] * 1.0
    out = attention(**{**given, "query": scaled})
    scaled.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_only_what_is_asked_for(device: str) -> None:
    """As with adapters of the query alone."""
    given = operands(device, is_causal=True)
    everything = gradients(with_lse(attention), given, with_lse=False)
    given["query"].requires_grad_()
    generator = torch.Generator().manual_seed(7)
    out = attention(**given)
    (out * torch.randn(out.shape, generator=generator).to(out)).sum().backward()
    assert torch.equal(given["query"].grad, everything["query"]) and given["key"].grad is None


def test_second_derivatives_of_packed_sequences_are_refused(device: str) -> None:
    given = leaves(packed(device))
    out = varlen_attention(**given)
    (gradient,) = torch.autograd.grad(out.square().sum(), given["query"], create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative; use .*scaled_dot_product_attention"):
        gradient.sum().backward()
