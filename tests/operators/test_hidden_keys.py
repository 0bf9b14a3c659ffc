"""Masked memory never affects the output, and a bad key reaches only the rows that see it: -inf in a float
mask hides a key as False in a bool mask does. A key with a weight of 0 is visible all the same. Once a row
sees a NaN or an infinity in a value, the other rows of the query heads that share it are undefined."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import torch_fattn
from tests.conftest import counted_launches
from tests.helpers import problems, small_problems
from tests.helpers.accuracy import expected
from tests.helpers.problems import Case
from tests.helpers.small_problems import row_of, run, with_values
from tests.helpers.tensors import same_bits

OPS = ("prefill", "decode", "paged_decode")
# With the head size: wide heads have a separate kernel.
SIZED_OPS = [(op, dim) for dim in (64, 136) for op in OPS]
BAD_KEY = 21  # not the first of its tile, block or fragment
UNLIKELY = -1e4  # weighs 0 beside a 0, in every mask dtype
ROWS = {"prefill": 40, "decode": 3, "paged_decode": 3}


def mask_of(op: str, kv_len: int = 64) -> Tensor:
    """As numbers: head 0 sees BAD_KEY in every row that may, head 1 in odd rows only; the rest is random."""
    mask = torch.zeros(1, 4, ROWS[op], kv_len)
    mask.masked_fill_(torch.rand(mask.shape, generator=torch.Generator().manual_seed(11)) < 0.3, -torch.inf)
    mask[:, 0, :, BAD_KEY] = 0.0
    mask[:, 1, :, BAD_KEY] = -torch.inf
    mask[:, 1, 1::2, BAD_KEY] = 0.0
    return mask


def case_of(op: str, dtype: torch.dtype, mask: Tensor, mask_dtype: torch.dtype, **fields: Any) -> Case:
    """One sequence under that mask. The problem has none, so that no key is poisoned."""
    rows, keys = mask.shape[-2:]
    lengths: dict[str, Any] = {"batch": 1, "kv_len": keys} if op == "prefill" else {"seq_lens": (keys,)}
    case = problems.build(small_problems.problem(op, dtype, q_len=rows, **lengths, **fields))
    given = mask > -torch.inf if mask_dtype == torch.bool else mask.to(mask_dtype)
    return with_values(case, attn_mask=given)


def check_influence(
    case: Case,
    operand: str,
    bad: float,
    device: str,
    bad_key: int = BAD_KEY,
    columns: slice = slice(None, None, 3),
) -> Tensor:
    """Rows that see the bad element are as in the reference; rows that do not keep every bit, but that a bad
    value leaves those of heads 0 and 1, which share it, undefined. Returns who sees it."""
    mask = case.clean["attn_mask"]
    rows, keys = mask.shape[-2:]
    sees = (mask if mask.dtype == torch.bool else mask > -torch.inf)[..., bad_key].clone()
    if case.problem.is_causal:
        sees &= torch.arange(keys - rows, keys) >= bad_key
    sees[:, 2:] = False
    if case.problem.is_decode:
        assert sees[:, :, -1].any()
    keeps = ~sees
    if operand == "value":
        keeps[:, :2] = False
    before, lse_before = run(case, device)
    for bad_row in (row_of(case, operand, bad_key), case.clean[operand][0, :, bad_key]):
        bad_row[0, columns] = bad
    after, lse_after = run(case, device)
    exact, exact_lse = (t[sees] for t in expected(case))
    assert before.isfinite().all() and keeps.any()
    assert torch.equal(after[keeps], before[keeps]) and torch.equal(lse_after[keeps], lse_before[keeps])
    assert torch.equal(after[sees].isnan(), exact.isnan())
    assert torch.equal(lse_after[sees].isnan(), exact_lse.isnan())
    finite = exact.isfinite()
    assert torch.equal(after[sees].isfinite(), finite)
    assert torch.allclose(after[sees][finite].double(), exact[finite], atol=2e-2)
    return sees


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("operand", ["key", "value"])
@pytest.mark.parametrize(("op", "dim"), SIZED_OPS)
def test_behind_a_mask(
    op: str, dim: int, operand: str, mask_dtype: torch.dtype, bad: float, device: str
) -> None:
    """A key of +inf has scores of +inf, and inf - inf is NaN."""
    case = case_of(op, torch.float16, mask_of(op), mask_dtype, head_dim=dim)
    assert check_influence(case, operand, bad, device).any()


@pytest.mark.parametrize("mask_dtype", problems.DTYPES, ids=str)
@pytest.mark.parametrize(("op", "dim"), SIZED_OPS)
def test_an_unlikely_key_is_seen(op: str, dim: int, mask_dtype: torch.dtype, device: str) -> None:
    """The control of -inf: a weight that underflows to 0 does not hide a NaN."""
    mask = mask_of(op)
    mask[:, 1, 0::2, BAD_KEY] = UNLIKELY
    case = case_of(op, torch.float32, mask, mask_dtype, head_dim=dim)
    assert check_influence(case, "value", torch.nan, device)[:, 1].all()


@pytest.mark.parametrize("dtype", problems.DTYPES, ids=str)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("operand", ["key", "value"])
@pytest.mark.parametrize("op", OPS)
def test_bad_keys_ahead_of_a_row(op: str, operand: str, bad: float, dtype: torch.dtype, device: str) -> None:
    """Some rows of a tile are behind the key, others see it. One infinite product of a key may be -inf, a
    weight of 0."""
    bad_key, mask = 40 if op == "prefill" else 62, mask_of(op)
    mask[:, :, :, bad_key] = 0.0
    case = case_of(op, dtype, mask, torch.bool, causality="bottom_right")
    sees = check_influence(case, operand, bad, device, bad_key, slice(5, 6))
    assert sees[:, :2, -1].all() and not sees[:, :2, 0].any()


@pytest.mark.parametrize("op", OPS)
def test_a_bad_query_row_stays_there(op: str, device: str) -> None:
    case = case_of(op, torch.bfloat16, mask_of(op), torch.bool)
    before, query = run(case, device)[0][0], case.operands["query"]
    query.of(query.base)[0, 3, 1] = torch.nan
    after = run(case, device)[0][0]
    assert after[3, 1].isnan().all()
    before[3, 1] = after[3, 1] = 0
    assert torch.equal(before, after)


@pytest.mark.parametrize("value", [0.0, UNLIKELY, -torch.inf])
def test_across_splits(value: float, device: str) -> None:
    """The same if the bad key is in another part, which the merge weighs."""
    mask = mask_of("decode", kv_len=2048)
    mask[:, :, :, :256] = UNLIKELY
    mask[:, 1, :, BAD_KEY] = value
    mask[:, 1, 0, :256] = -torch.inf
    case = case_of("decode", torch.float16, mask, torch.float32)
    with counted_launches() as launches:
        sees = check_influence(case, "value", torch.nan, device)
    assert launches.get("fattn_merge", 0) == 2 * (device == "mps")
    assert sees[0, 1].tolist() == [False, value > -torch.inf, value > -torch.inf]


def test_merge_counts_a_part_by_its_lse(device: str) -> None:
    """-inf: it saw no key. Anything else: it counts, even at a weight of 0."""
    outs, lses = torch.randn(2, 1, 1, 3, 8), torch.zeros(2, 1, 1, 3)
    outs[1] = torch.nan
    lses[1, 0, 0] = torch.tensor([-torch.inf, -1e4, 0.0])
    out, _ = torch.ops.fattn.merge(outs.to(device), lses.to(device))
    assert torch.equal(out[0, 0, 0].cpu(), outs[0, 0, 0, 0])
    assert out[0, 0, 1:].isnan().all()
    assert torch.equal(torch_fattn.reference.merge(outs, lses)[0].isnan(), out.cpu().isnan())


@pytest.mark.parametrize("dim", [64, 192])
@pytest.mark.parametrize("op", ["prefill", "decode"])
def test_a_bad_sequence_leaves_the_others_alone(op: str, dim: int, device: str) -> None:
    """A row of the bad sequence that sees no key is still 0."""
    case = problems.build(problems.Problem(3, op, torch.float16, 2, 4, 2, 5, 70, dim, dim, mask=torch.bool))
    case.operands["attn_mask"].of(case.operands["attn_mask"].base)[0, :, 2] = False
    clean = run(case, device)
    for name in ("key", "value"):
        side = case.operands[name]
        side.of(side.base)[0] = torch.nan
    out, lse = run(case, device)
    assert same_bits((out[1:], lse[1:]), (clean[0][1:], clean[1][1:]))
    assert out[0, :, 2].eq(0).all() and out[0, :, 3].isnan().all()
