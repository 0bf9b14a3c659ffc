"""Sinks, ALiBi slopes and mask values up to the largest float, and infinite ones: as in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import torch_fattn
from tests.helpers import problems
from tests.helpers.accuracy import expected, packed
from tests.helpers.small_problems import problem, run, with_values
from tests.operators.test_edges import dense, ids
from torch_fattn import reference

fattn = torch.ops.fattn
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
