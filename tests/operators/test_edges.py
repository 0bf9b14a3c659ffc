"""Edges of the operators' contract: rows without keys, extreme scores, merge, autograd."""

from __future__ import annotations

import math
import os

import pytest
import torch
from torch import Tensor

import torch_fattn
from tests.conftest import Checked, counted_launches
from tests.helpers import problems
from tests.helpers.accuracy import assert_close, assert_lse_close, expected
from tests.helpers.problems import Problem
from torch_fattn import reference

fattn = torch.ops.fattn
DTYPES = problems.DTYPES
ids = problems.SHORT.get


def problem(op: str = "prefill", dtype: torch.dtype = torch.float32, **changes: object) -> Problem:
    """A small call of that op, with changes."""
    fields: dict[str, object] = {
        "batch": 2,
        "q_heads": 4,
        "kv_heads": 2,
        "q_len": 20,
        "kv_len": 37,
        "head_dim": 64,
    }
    if op != "prefill":
        fields |= {"q_len": 4, "kv_len": 96, "seq_lens": (61, 96)}
    if op in ("paged_prefill", "varlen_prefill"):
        fields |= {"q_len": 30, "q_lens": (30, 1), "causality": "bottom_right"}
    if op.startswith("paged"):
        fields |= {"block_size": 16}
    fields |= changes
    fields.setdefault("value_dim", fields["head_dim"])
    return Problem(index=0, op=op, dtype=dtype, **fields)  # type: ignore[arg-type]


def run(device: str, case: problems.Case) -> tuple[Tensor, Tensor]:
    out, lse = getattr(fattn, case.problem.op)(**case.arguments(device)[0])
    return out.cpu(), lse.cpu()


def with_values(case: problems.Case, **tensors: Tensor) -> problems.Case:
    """The case with other numbers in dense, contiguous operands."""
    for name, tensor in tensors.items():
        case.clean[name] = tensor
        case.operands[name] = problems.lay_out(tensor, "contiguous")
    return case


# ---- rows that see no key, and memory that nothing may see


@pytest.mark.parametrize("dtype", DTYPES, ids=ids)
def test_rows_above_the_causal_diagonal_see_nothing(dtype: torch.dtype, device: str) -> None:
    case = problems.build(problem(dtype=dtype, q_len=30, kv_len=11, causality="bottom_right"))
    out, lse = run(device, case)
    assert torch.all(out[:, :, :19] == 0) and torch.all(lse[:, :, :19] == -torch.inf)
    assert_close(case, out, lse)


@pytest.mark.parametrize("dim", [64, 136])
@pytest.mark.parametrize("first", [0, 2])
def test_windows_past_the_last_key_are_empty(dim: int, first: int, device: str) -> None:
    """Rows see a sink, and perhaps the first keys. The last keys, which no row sees, have NaN values."""
    where = {"causality": "offset", "q_offset": 43, "window_left": 5, "sink_tokens": first}
    case = problems.build(problem(head_dim=dim, sinks=True, **where))
    assert case.operands["value"].of(case.operands["value"].base)[:, :, -1].isnan().all()
    assert_close(case, *run(device, case))


@pytest.mark.parametrize("op", ["prefill", "decode", "paged_decode"])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32], ids=ids)
def test_fully_masked_rows(op: str, dtype: torch.dtype, device: str) -> None:
    case = problems.build(problem(op, mask=dtype))
    mask = case.clean["attn_mask"].clone()
    mask[0, :, 1] = False if dtype == torch.bool else -torch.inf
    mask[1] = False if dtype == torch.bool else -torch.inf
    case = with_values(case, attn_mask=mask)
    if dtype == torch.bool:
        case.visible &= mask
    out, lse = run(device, case)
    assert torch.all(out[1] == 0) and torch.all(lse[1] == -torch.inf)
    assert torch.all(out[0, :, 1] == 0) and torch.all(lse[0, :, 1] == -torch.inf)
    assert_close(case, out, lse)


def test_prefill_without_keys(device: str) -> None:
    query = torch.randn(2, 4, 5, 64, device=device)
    key, value = torch.randn(2, 2, 0, 64, device=device), torch.randn(2, 2, 0, 40, device=device)
    out, lse = fattn.prefill(query, key, value)
    assert out.shape == (2, 4, 5, 40) and torch.all(out.cpu() == 0)
    assert torch.all(lse.cpu() == -torch.inf)


@pytest.mark.parametrize("op", ["decode", "paged_decode"])
def test_empty_sequences(op: str, device: str) -> None:
    case = problems.build(problem(op, seq_lens=(0, 0)))
    out, lse = run(device, case)
    assert torch.all(out == 0) and torch.all(lse == -torch.inf)


def test_decode_without_capacity(device: str) -> None:
    query = torch.randn(2, 4, 1, 64, device=device)
    empty = torch.randn(2, 2, 0, 64, device=device)
    out, lse = fattn.decode(query, empty, empty)
    assert torch.all(out.cpu() == 0) and torch.all(lse.cpu() == -torch.inf)
    pool = torch.randn(3, 16, 2, 64, device=device)
    table = torch.zeros(2, 0, dtype=torch.int32, device=device)
    out, lse = fattn.paged_decode(query, pool, pool, table, torch.zeros(2, dtype=torch.int32, device=device))
    assert torch.all(out.cpu() == 0) and torch.all(lse.cpu() == -torch.inf)


@pytest.mark.parametrize("op", ["decode", "paged_decode"])
def test_sequences_shorter_than_the_query(op: str, device: str) -> None:
    """Rows before the sequence's first token see no key."""
    case = problems.build(problem(op, q_len=6, seq_lens=(2, 5)))
    out, lse = run(device, case)
    assert torch.all(out[0, :, :4] == 0) and torch.all(lse[0, :, :4] == -torch.inf)
    assert_close(case, out, lse)


@pytest.mark.parametrize("empty", ["batch", "heads", "q_len"])
@pytest.mark.parametrize("op", ["prefill", "decode", "paged_decode"])
def test_empty_results_launch_nothing(op: str, empty: str, device: str) -> None:
    sizes = {"batch": 2, "heads": 4, "q_len": 3} | {empty: 0}
    batch, heads, q_len = sizes["batch"], sizes["heads"], sizes["q_len"]
    query = torch.randn(batch, heads, q_len, 64, device=device)
    key = torch.randn(batch, heads, 32, 64, device=device)
    value = torch.randn(batch, heads, 32, 40, device=device)
    arguments: tuple[Tensor, ...] = (query, key, value)
    if op == "paged_decode":
        table = torch.zeros(batch, 2, dtype=torch.int32, device=device)
        lengths = torch.full((batch,), 20, dtype=torch.int32, device=device)
        key, value = (torch.randn(3, 16, heads, d, device=device) for d in (64, 40))
        arguments = (query, key, value, table, lengths)
    with counted_launches() as launches:
        out, lse = getattr(fattn, op)(*arguments)
    assert out.shape == (batch, heads, q_len, 40) and lse.shape == (batch, heads, q_len)
    assert out.device.type == device and launches == {}


# ---- extreme scores


@pytest.mark.parametrize("op", ["prefill", "decode", "paged_decode"])
@pytest.mark.parametrize("dtype", DTYPES, ids=ids)
def test_large_logits(op: str, dtype: torch.dtype, device: str) -> None:
    """Scores of hundreds to 1e4: a maximum that is not subtracted overflows, and so does a sum in half."""
    case = problems.build(problem(op, dtype, scale=1.0))
    # A power of two keeps the operands' rounding, so that the reference sees the same numbers.
    case = with_values(case, query=case.clean["query"] * 256)
    out, lse = run(device, case)
    assert 3e3 < lse.max() < 3e4
    assert_close(case, out, lse)


@pytest.mark.parametrize("op", ["prefill", "decode"])
@pytest.mark.parametrize("dtype", DTYPES, ids=ids)
def test_equal_logits_average_the_values(op: str, dtype: torch.dtype, device: str) -> None:
    case = problems.build(problem(op, dtype))
    case = with_values(case, query=torch.zeros_like(case.clean["query"]))
    out, lse = run(device, case)
    assert_close(case, out, lse)
    seen = case.visible.sum(dim=-1)
    assert torch.allclose(lse.exp(), seen.float(), rtol=1e-4)


@pytest.mark.parametrize("op", ["prefill", "decode"])
@pytest.mark.parametrize("dtype", DTYPES, ids=ids)
def test_one_dominant_key(op: str, dtype: torch.dtype, device: str) -> None:
    """All the weight on key 5, whose value comes through unchanged where exp2(0) is 1: the specification lets
    fast::exp2 be 3 ulps off, in the weight and in the sum."""
    case = problems.build(problem(op, dtype, seq_lens=None, q_len=1, head_dim=40))
    key = case.clean["key"].clone()
    key[:, :, 5] = case.clean["query"].reshape(2, 2, 2, 1, 40)[:, :, 0, 0] * 100
    case = with_values(case, key=key, value=case.clean["value"])
    out, lse = run(device, case)
    assert_close(case, out, lse)
    ulps = 8 if os.environ.get("SOFTMETAL_FAST_MATH") == "worst" else 0
    rtol = ulps * torch.finfo(torch.float32).eps if dtype == torch.float32 else 0
    torch.testing.assert_close(out[:, ::2, 0], case.clean["value"][:, :, 5], rtol=rtol, atol=0)


@pytest.mark.parametrize("op", ["prefill", "decode", "paged_decode"])
@pytest.mark.parametrize("dtype", DTYPES, ids=ids)
def test_lowest_mask_values(op: str, dtype: torch.dtype, device: str) -> None:
    """finfo.min, which many libraries use for "masked": no weight beside a 0, equal weights when alone."""
    case = problems.build(problem(op, dtype, mask=torch.float32))
    shape = case.clean["attn_mask"].shape
    lowest = torch.finfo(torch.float32).min
    mask = torch.where(torch.rand(shape, generator=torch.Generator().manual_seed(3)) < 0.5, 0.0, lowest)
    mask[0, 1, 2] = lowest
    case = with_values(case, attn_mask=mask)
    exact_out, exact_lse = expected(case)
    out, lse = run(device, case)
    assert_close(case, out, lse)
    alone = exact_lse < -1e38
    assert alone[0, 1, 2] and not alone.all()
    assert torch.allclose(out[alone].double(), exact_out[alone], atol=2e-2)


LONG = {
    "prefill": {"q_len": 4, "kv_len": 1500},
    "decode": {"q_len": 1, "kv_len": 1104, "seq_lens": (1025, 1104)},
    "paged_decode": {"q_len": 1, "kv_len": 1104, "seq_lens": (1025, 1104)},
}


@pytest.mark.parametrize("op", LONG)
@pytest.mark.parametrize("logits", ["lowest", "equal"])
def test_large_logits_over_parts_of_the_keys(op: str, logits: str, device: str) -> None:
    """Parts count by how many keys they have where a float32 log-sum-exp has no room for that number."""
    case = problems.build(problem(op, mask=torch.float32, **LONG[op]))
    value = torch.finfo(torch.float32).min if logits == "lowest" else 1e5
    case = with_values(case, attn_mask=torch.full_like(case.clean["attn_mask"], value))
    if logits == "equal" and op != "paged_decode":  # so large without a mask
        case = problems.build(problem(op, scale=1e3, **LONG[op]))
        first_key = case.clean["key"][:, :, :1]
        case = with_values(case, key=first_key.expand_as(case.clean["key"]).contiguous())
    with counted_launches() as launches:
        out, lse = run(device, case)
    assert device == "cpu" or launches["fattn_merge"] == 1
    assert_close(case, out, lse)


@pytest.mark.parametrize("op", ["prefill", "decode"])
def test_float32_mask_beyond_the_range_of_half(op: str, device: str) -> None:
    """Differences between mask values below -65504 still count."""
    case = problems.build(problem(op, torch.float16, mask=torch.float32))
    mask = -1e5 - case.clean["attn_mask"].nan_to_num(neginf=0).abs().mul(64).round() / 64
    case = with_values(case, attn_mask=mask)
    out, lse = run(device, case)
    assert_close(case, out, lse)
    case.clean["attn_mask"] = mask.clamp(min=-65504)
    with pytest.raises(AssertionError):
        assert_close(case, out, lse)


@pytest.mark.parametrize(
    "shape", [(37,), (20, 37), (1, 37), (4, 20, 37), (4, 1, 1), (2, 1, 1, 37), (2, 4, 20, 1)]
)
def test_mask_shapes_broadcast_from_the_right(shape: tuple[int, ...], device: str) -> None:
    case = problems.build(problem())
    mask = torch.randn(shape, generator=torch.Generator().manual_seed(5))
    arguments = case.arguments(device)[0]
    case.clean["attn_mask"] = mask
    out, lse = fattn.prefill(**arguments, attn_mask=mask.to(device))
    assert_close(case, out.cpu(), lse.cpu())


# ---- partial results


def dense(q_len: int, kv_len: int, dtype: torch.dtype, heads: tuple[int, int] = (4, 2)) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(7)
    shapes = ((2, heads[0], q_len, 64), (2, heads[1], kv_len, 64), (2, heads[1], kv_len, 64))
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)


@pytest.mark.parametrize("dtype", DTYPES, ids=ids)
def test_merge_joins_disjoint_keys(dtype: torch.dtype, device: str, checked: Checked) -> None:
    """Attention over three parts of the keys, one of which no row sees, merged: attention over all."""
    query, key, value = dense(20, 48, dtype)
    mask = torch.zeros(3, 1, 1, 20, 48, dtype=torch.bool)
    for part, (start, end) in enumerate(((0, 17), (17, 48), (48, 48))):
        mask[part, ..., start:end] = True
    on_device = [t.to(device) for t in (query, key, value)]
    parts = [fattn.prefill(*on_device, mask[i].to(device)) for i in range(3)]
    with checked(), counted_launches() as launches:
        out, lse = fattn.merge(torch.stack([p[0] for p in parts]), torch.stack([p[1] for p in parts]))
    assert launches == ({"fattn_merge": 1} if device == "mps" else {})
    whole, whole_lse = fattn.prefill(*on_device)
    rounding = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
    assert out.dtype == dtype
    assert torch.allclose(out.cpu().double(), whole.cpu().double(), atol=rounding)
    assert_lse_close(lse.cpu(), whole_lse.cpu().double(), dtype)


def test_merge_of_packed_results(device: str) -> None:
    """The first part of the keys has none of the second sequence."""
    query, key, value = torch.randn(12, 4, 64), *torch.randn(2, 28, 2, 64)
    parts = []
    for first, second, end in ((0, 20, 28), (0, 7, 7), (7, 20, 28)):  # all keys, and both parts
        cu_seqlens = torch.tensor([[0, 5, 12], [0, second - first, end - first]], dtype=torch.int32)
        operands = (query, key[first:end], value[first:end], *cu_seqlens)
        parts.append(fattn.varlen_prefill(*(each.to(device) for each in operands), 7, 20))
    (whole, whole_lse), *parts = parts
    outs, lses = (torch.stack(each) for each in zip(*parts, strict=True))
    out, lse = torch_fattn.merge(outs, lses, return_lse=True)
    assert out.is_contiguous() and lse.is_contiguous()
    for merged in ((out, lse), reference.merge(outs, lses)):
        assert torch.allclose(merged[0].cpu().double(), whole.cpu().double(), atol=1e-6)
        assert torch.allclose(merged[1].cpu().double(), whole_lse.cpu().double(), atol=1e-5)


def test_merge_of_nothing_is_nothing(device: str) -> None:
    outs = torch.full((2, 1, 2, 3, 8), torch.nan)
    outs[:] = 0
    lses = torch.full((2, 1, 2, 3), -torch.inf)
    out, lse = fattn.merge(outs.to(device), lses.to(device))
    assert torch.all(out.cpu() == 0) and torch.all(lse.cpu() == -torch.inf)


def test_merge_weighs_by_the_exponential(device: str) -> None:
    outs = torch.tensor([1.0, 5.0]).reshape(2, 1, 1, 1, 1).expand(2, 1, 1, 1, 8).contiguous()
    lses = torch.tensor([math.log(3.0), 0.0]).reshape(2, 1, 1, 1)
    out, lse = fattn.merge(outs.to(device), lses.to(device))
    assert torch.allclose(out.cpu(), torch.full((1, 1, 1, 8), 2.0))
    assert torch.allclose(lse.cpu(), torch.full((1, 1, 1), math.log(4.0)))


# ---- autograd


@pytest.mark.parametrize("op", ["prefill", "decode", "paged_decode", "paged_prefill", "varlen_prefill"])
def test_forward_works_and_backward_refuses(op: str, device: str) -> None:
    case = problems.build(problem(op))
    arguments, _ = case.arguments(device)
    plain, _ = getattr(fattn, op)(**arguments)
    arguments["query"] = arguments["query"].clone().requires_grad_()
    out, lse = getattr(fattn, op)(**arguments)
    assert torch.equal(out.detach().cpu(), plain.cpu())
    for result in (out, lse):
        with pytest.raises(RuntimeError, match="no backward.*scaled_dot_product_attention"):
            result.nan_to_num().sum().backward(retain_graph=True)
    assert arguments["query"].grad is None
