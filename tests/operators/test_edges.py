"""Edges of the operators' contract: extreme scores, merge; and sinks, ALiBi slopes and
mask values up to the largest float, and infinite ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import torch_fattn
from tests.conftest import Checked, counted_launches
from tests.helpers import problems
from tests.helpers.accuracy import assert_close, assert_lse_close, expected, packed
from tests.helpers.small_problems import problem, run, with_values
from torch_fattn import reference

fattn = torch.ops.fattn
DTYPES = problems.DTYPES
ids = problems.SHORT.get


# ---- extreme scores


@pytest.mark.parametrize("op", ["prefill", "decode", "paged_decode"])
@pytest.mark.parametrize("dtype", DTYPES, ids=ids)
def test_large_logits(op: str, dtype: torch.dtype, device: str) -> None:
    """Scores of hundreds to 1e4: a maximum that is not subtracted overflows, and so does a sum in half."""
    case = problems.build(problem(op, dtype, scale=1.0))
    # A power of two keeps the operands' rounding, so that the reference sees the same numbers.
    case = with_values(case, query=case.clean["query"] * 256)
    out, lse = run(case, device)
    assert 3e3 < lse.max() < 3e4
    assert_close(case, out, lse)


@pytest.mark.parametrize("op", ["prefill", "decode", "paged_decode"])
@pytest.mark.parametrize("dtype", DTYPES, ids=ids)
def test_lowest_mask_values(op: str, dtype: torch.dtype, device: str) -> None:
    """finfo.min, which many libraries use for "masked": no weight beside a 0, equal weights when alone."""
    case = problems.build(problem(op, dtype))
    shape = case.visible.shape
    lowest = torch.finfo(torch.float32).min
    mask = torch.where(torch.rand(shape, generator=torch.Generator().manual_seed(3)) < 0.5, 0.0, lowest)
    mask[0, 1, 2] = lowest
    case = with_values(case, attn_mask=mask)
    exact_out, exact_lse = expected(case)
    out, lse = run(case, device)
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
    case = problems.build(problem(op, **LONG[op]))
    value = torch.finfo(torch.float32).min if logits == "lowest" else 1e5
    case = with_values(case, attn_mask=torch.full(case.visible.shape, value))
    if logits == "equal" and op != "paged_decode":  # so large without a mask
        case = problems.build(problem(op, scale=1e3, **LONG[op]))
        first_key = case.clean["key"][:, :, :1]
        case = with_values(case, key=first_key.expand_as(case.clean["key"]).contiguous())
    with counted_launches() as launches:
        out, lse = run(case, device)
    assert device == "cpu" or launches["fattn_merge"] == 1
    assert_close(case, out, lse)


@pytest.mark.parametrize("op", ["prefill", "decode"])
def test_float32_mask_beyond_the_range_of_half(op: str, device: str) -> None:
    """Differences between mask values below -65504 still count."""
    case = problems.build(problem(op, torch.float16))
    drawn = torch.randn(case.visible.shape, generator=torch.Generator().manual_seed(3))
    mask = -1e5 - (drawn * 128).abs().round() / 64
    case = with_values(case, attn_mask=mask)
    out, lse = run(case, device)
    assert_close(case, out, lse)
    case.clean["attn_mask"] = mask.clamp(min=-65504)
    with pytest.raises(AssertionError):
        assert_close(case, out, lse)


@pytest.mark.parametrize(
    "shape", [(37,), (20, 37), (1, 37), (4, 20, 37), (4, 1, 1), (2, 1, 1, 37), (2, 4, 20, 1)]
)
def test_mask_shapes_broadcast_from_the_right(shape: tuple[int, ...], device: str) -> None:
    case = problems.build(problem("prefill"))
    mask = torch.randn(shape, generator=torch.Generator().manual_seed(5))
    arguments = case.arguments(device)[0]
    case.clean["attn_mask"] = mask
    out, lse = fattn.prefill(**arguments, attn_mask=mask.to(device))
    assert_close(case, out.cpu(), lse.cpu())


# ---- partial results


def dense(q_len: int, kv_len: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(7)
    shapes = ((2, 4, q_len, 64), (2, 2, kv_len, 64), (2, 2, kv_len, 64))
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


# ---- numbers up to the largest float

LARGEST = torch.finfo(torch.float32).max


def assert_same_as_exact(out: Tensor, lse: Tensor, exact_out: Tensor, exact_lse: Tensor) -> None:
    """Also with a NaN or an infinity."""
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[out.dtype]
    torch.testing.assert_close(out.double(), exact_out, rtol=0, atol=tolerance, equal_nan=True)
    # The float64 result may be beyond float32.
    torch.testing.assert_close(lse, exact_lse.float(), rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize(
    "sinks", [(LARGEST, -LARGEST, 2.4e38, 2.3e38), (torch.inf, torch.nan, -torch.inf, 0.0)]
)
@pytest.mark.parametrize("options", [{}, {"mask": torch.float32}, {"head_dim": 136, "kv_len": 560}], ids=str)
@pytest.mark.parametrize("op", ["prefill", "decode", "paged_decode", "paged_prefill", "varlen_prefill"])
def test_sinks_of_any_size(op: str, options: dict[str, Any], sinks: tuple[float, ...], device: str) -> None:
    """All weight is on a huge one, and its logit is lse. One far below 0 is the lse of rows without keys."""
    if "mask" in options and op in ("paged_prefill", "varlen_prefill"):
        options = {}  # which take none
    lengths = {"seq_lens": (0, options.get("kv_len", 96))}
    if op == "prefill":
        lengths = {"q_len": options.get("kv_len", 37) + 3, "causality": "bottom_right"}
    case = problems.build(problem(op, torch.float16, sinks=True, **{**options, **lengths}))
    case.clean["sinks"] = torch.tensor(sinks)
    case.operands["sinks"] = problems.spread(case.clean["sinks"])
    out, lse = run(case, device)
    exact = expected(case)
    assert_same_as_exact(out, lse, *(packed(case, *exact) if case.problem.q_lens is not None else exact))
    if sinks[0] == LARGEST:
        heads = out[..., 0, :] if case.problem.q_lens is not None else out[:, 0]
        assert torch.all(heads == 0) and (lse == LARGEST).any() and (lse == -LARGEST).any()


def test_huge_sinks_survive_a_merge(device: str) -> None:
    """The same for the merge of a decode's parts, and that of a shared prefix."""
    sinks = torch.tensor([LARGEST, -LARGEST, 2.4e38, 0.0])
    query, key, value = dense(1, 600, torch.float32)
    prefix_key, prefix_value = key[:1, :, :500], value[:1, :, :500]
    key, value = (
        torch.cat((shared.expand(2, -1, -1, -1), own[:, :, 500:]), 2)
        for shared, own in ((prefix_key, key), (prefix_value, value))
    )
    exact = reference.decode(query, key, value, sinks=sinks)
    on_device = [t.to(device) for t in (query, key, value, prefix_key, prefix_value, sinks)]
    query, key, value, prefix_key, prefix_value, sinks = on_device
    parts = [(key[:, :, :300], value[:, :, :300], sinks), (key[:, :, 300:], value[:, :, 300:], None)]
    results = [fattn.decode(query, k, v, sinks=s) for k, v, s in parts]
    merged = fattn.merge(torch.stack([out for out, _ in results]), torch.stack([lse for _, lse in results]))
    suffix = (prefix_key, prefix_value, key[:, :, 500:], value[:, :, 500:])
    shared = torch_fattn.shared_prefix_decode(query, *suffix, sinks=sinks, return_lse=True)
    whole = [op(query, key, value, sinks=sinks) for op in (fattn.decode, fattn.prefill)]
    for out, lse in (*whole, merged, shared):
        assert_same_as_exact(out.cpu(), lse.cpu(), *exact)


def test_alibi_slopes_of_any_size(device: str) -> None:
    """A row whose own key is at distance 0 sees nothing else under a huge slope."""
    query, key, value = dense(20, 20, torch.float32)
    slopes = torch.tensor([LARGEST, 2.4e38, 1.0, 0.0])
    exact = reference.prefill(query, key, value, is_causal=True, alibi_slopes=slopes)
    operands = (t.to(device) for t in (query, key, value))
    out, lse = fattn.prefill(*operands, is_causal=True, alibi_slopes=slopes.to(device))
    assert_same_as_exact(out.cpu(), lse.cpu(), *exact)


@pytest.mark.parametrize("op", ["prefill", "decode"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=ids)
def test_largest_mask_values(op: str, dtype: torch.dtype, device: str) -> None:
    case = problems.build(problem(op))
    shape = case.visible.shape
    largest = torch.tensor(torch.finfo(dtype).max)
    values = torch.stack((largest, largest * 0.75, -largest, largest * 0))
    kinds = torch.randint(0, 4, shape, generator=torch.Generator().manual_seed(3))
    kinds[0, 1, 2] = 2
    case = with_values(case, attn_mask=values[kinds].to(dtype))
    assert_same_as_exact(*run(case, device), *expected(case))
