"""Masked memory never affects the output, and a bad key reaches only the rows that see it: -inf in a float
mask hides a key as False in a bool mask does. A key with a weight of 0 is visible all the same. Once a row
sees a NaN or an infinity in a value, the other rows of the query heads that share it are undefined."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_fattn
from tests.conftest import Checked, counted_launches, needs_emulator
from tests.helpers import direct_launch, drawing, problems
from tests.helpers.tensors import same_bits

MASK_DTYPES = [torch.bool, *problems.DTYPES]
OPS = ("prefill", "decode", "paged_decode")
# With the head size: wide heads have a separate kernel.
SIZED_OPS = [(op, dim) for dim in (64, 136) for op in OPS]
BLOCK = 16
BAD_KEY = 21  # not the first of its tile, block or fragment
UNLIKELY = -1e4  # weighs 0 beside a 0, in every mask dtype
ROWS = {"prefill": 40, "decode": 3, "paged_decode": 3}


@dataclass
class Call:
    """Dense operands on the CPU, and the mask as numbers: 0, UNLIKELY or -inf."""

    op: str
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor
    bad_key: int = BAD_KEY
    is_causal: bool = False  # prefill alone has a choice

    @property
    def visible(self) -> Tensor:
        """bool [1, heads, rows, keys]"""
        rows, keys = self.mask.shape[-2:]
        causal = torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)
        return (self.mask > -torch.inf) & (causal | (self.op == "prefill" and not self.is_causal))

    def run(self, device: str, mask_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        op = getattr(torch.ops.fattn, self.op)
        out, lse = op(
            **{name: a.to(device) for name, a in self.arguments(mask_dtype).items()}, **self.options
        )
        return out.cpu(), lse.cpu()

    def exact(self, mask_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return getattr(torch_fattn.reference, self.op)(**self.arguments(mask_dtype), **self.options)

    @property
    def options(self) -> dict[str, bool]:
        return {"is_causal": True} if self.is_causal else {}

    def arguments(self, mask_dtype: torch.dtype) -> dict[str, Any]:
        mask = self.mask > -torch.inf if mask_dtype == torch.bool else self.mask.to(mask_dtype)
        if self.op != "paged_decode":
            return {"query": self.query, "key": self.key, "value": self.value, "attn_mask": mask}
        batch, _, length, _ = self.key.shape
        tables = torch.arange(batch * length // BLOCK, dtype=torch.int32).view(batch, -1)
        pools = {
            f"{name}_cache": dense.transpose(1, 2).reshape(-1, BLOCK, dense.shape[1], dense.shape[3])
            for name, dense in (("key", self.key), ("value", self.value))
        }
        lengths = torch.full((batch,), length, dtype=torch.int32)
        return {"query": self.query, **pools, "block_tables": tables, "seq_lens": lengths, "attn_mask": mask}


def call(op: str, dtype: torch.dtype, kv_len: int = 64, dim: int = 64) -> Call:
    """Head 0 sees BAD_KEY in every row that may, head 1 in odd rows only; the rest of the mask is random."""
    generator = torch.Generator().manual_seed(11)
    rows = ROWS[op]

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    operands = randn(1, 4, rows, dim), randn(1, 2, kv_len, dim), randn(1, 2, kv_len, dim)
    mask = torch.zeros(1, 4, rows, kv_len)
    mask.masked_fill_(torch.rand(mask.shape, generator=generator) < 0.3, -torch.inf)
    mask[:, 0, :, BAD_KEY] = 0.0
    mask[:, 1, :, BAD_KEY] = -torch.inf
    mask[:, 1, 1::2, BAD_KEY] = 0.0
    return Call(op, *operands, mask)


def poisoned(clean: Call, operand: str, bad: float, columns: slice = slice(None, None, 3)) -> Call:
    tensor = getattr(clean, operand).clone()
    tensor[0, 0, clean.bad_key, columns] = bad
    return replace(clean, **{operand: tensor})


def check_influence(
    clean: Call, operand: str, bad: float, device: str, mask_dtype: torch.dtype, **options: slice
) -> Tensor:
    """Rows that see the bad element are as in the reference; rows that do not keep every bit, but that a bad
    value leaves those of heads 0 and 1, which share it, undefined. Returns who sees it."""
    dirty = poisoned(clean, operand, bad, **options)
    sees = torch.zeros(clean.query.shape[:3], dtype=torch.bool)
    sees[:, :2] = clean.visible[:, :2, :, clean.bad_key]
    if clean.op != "prefill":
        assert sees[:, :, -1].any()
    keeps = ~sees
    if operand == "value":
        keeps[:, :2] = False
    before, lse_before = clean.run(device, mask_dtype)
    after, lse_after = dirty.run(device, mask_dtype)
    exact, exact_lse = (t[sees] for t in dirty.exact(mask_dtype))
    assert before.isfinite().all() and keeps.any()
    assert torch.equal(after[keeps], before[keeps]) and torch.equal(lse_after[keeps], lse_before[keeps])
    assert torch.equal(after[sees].isnan(), exact.isnan())
    assert torch.equal(lse_after[sees].isnan(), exact_lse.isnan())
    finite = exact.isfinite()
    assert torch.equal(after[sees].isfinite(), finite)
    assert torch.allclose(after[sees][finite].double(), exact[finite], atol=2e-2)
    return sees


@pytest.mark.parametrize("device", ["mps", "cpu"])
@pytest.mark.parametrize("mask_dtype", MASK_DTYPES, ids=str)
@pytest.mark.parametrize("operand", ["key", "value"])
@pytest.mark.parametrize(("op", "dim"), SIZED_OPS)
def test_nan_behind_a_mask(op: str, dim: int, operand: str, mask_dtype: torch.dtype, device: str) -> None:
    clean = call(op, torch.float32, dim=dim)
    sees = check_influence(clean, operand, torch.nan, device, mask_dtype)
    assert sees.any()


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf])
@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("operand", ["key", "value"])
@pytest.mark.parametrize(("op", "dim"), SIZED_OPS)
def test_infinity_behind_a_mask(
    op: str, dim: int, operand: str, mask_dtype: torch.dtype, bad: float, device: str
) -> None:
    """A key of +inf has scores of +inf, and inf - inf is NaN."""
    clean = call(op, torch.float16, dim=dim)
    check_influence(clean, operand, bad, device, mask_dtype)


@pytest.mark.parametrize("device", ["mps", "cpu"])
@pytest.mark.parametrize("mask_dtype", problems.DTYPES, ids=str)
@pytest.mark.parametrize(("op", "dim"), SIZED_OPS)
def test_an_unlikely_key_is_seen(op: str, dim: int, mask_dtype: torch.dtype, device: str) -> None:
    """The control of -inf: a weight that underflows to 0 does not hide a NaN."""
    clean = call(op, torch.float32, dim=dim)
    clean.mask[:, 1, 0::2, BAD_KEY] = UNLIKELY
    sees = check_influence(clean, "value", torch.nan, device, mask_dtype)
    assert sees[:, 1].all()


@pytest.mark.parametrize("dtype", problems.DTYPES, ids=str)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("operand", ["key", "value"])
@pytest.mark.parametrize("op", OPS)
def test_bad_keys_ahead_of_a_row(op: str, operand: str, bad: float, dtype: torch.dtype, device: str) -> None:
    """Some rows of a tile are behind the key, others see it. One infinite product of a key may be -inf, a
    weight of 0."""
    clean = replace(call(op, dtype), bad_key=40 if op == "prefill" else 62, is_causal=op == "prefill")
    clean.mask[:, :, :, clean.bad_key] = 0.0
    sees = check_influence(clean, operand, bad, device, torch.bool, columns=slice(5, 6))
    assert sees[:, :2, -1].all() and not sees[:, :2, 0].any()


@pytest.mark.parametrize("op", OPS)
def test_a_bad_query_row_stays_there(op: str, device: str) -> None:
    clean = call(op, torch.bfloat16)
    dirty = replace(clean, query=clean.query.clone())
    dirty.query[0, 3, 1] = torch.nan
    before, after = (
        results[0][0] for results in (clean.run(device, torch.bool), dirty.run(device, torch.bool))
    )
    assert after[3, 1].isnan().all()
    before[3, 1] = after[3, 1] = 0
    assert torch.equal(before, after)


@pytest.mark.parametrize("value", [0.0, UNLIKELY, -torch.inf])
def test_across_splits(value: float, device: str) -> None:
    """The same if the bad key is in another part, which the merge weighs."""
    clean = call("decode", torch.float16, kv_len=2048)
    clean.mask[:, :, :, :256] = UNLIKELY
    clean.mask[:, 1, :, BAD_KEY] = value
    clean.mask[:, 1, 0, :256] = -torch.inf
    with counted_launches() as launches:
        sees = check_influence(clean, "value", torch.nan, device, torch.float32)
    assert launches.get("fattn_merge", 0) == 2 * (device == "mps")
    assert sees[0, 1].tolist() == [False, value > -torch.inf, value > -torch.inf]


@pytest.mark.parametrize("device", ["mps", "cpu"])
def test_merge_counts_a_part_by_its_lse(device: str) -> None:
    """-inf: it saw no key. Anything else: it counts, even at a weight of 0."""
    outs, lses = torch.randn(2, 1, 1, 3, 8), torch.zeros(2, 1, 1, 3)
    outs[1] = torch.nan
    lses[1, 0, 0] = torch.tensor([-torch.inf, -1e4, 0.0])
    out, _ = torch.ops.fattn.merge(outs.to(device), lses.to(device))
    assert torch.equal(out[0, 0, 0].cpu(), outs[0, 0, 0, 0])
    assert out[0, 0, 1:].isnan().all()
    assert torch.equal(torch_fattn.reference.merge(outs, lses)[0].isnan(), out.cpu().isnan())


# ---- random problems

FINITE = 0.75  # in place of each NaN that lies where no row looks
# Some problems of test_random. In them all rows often hide keys that lie between others.
UNSEEN = [
    p
    for p in drawing.draw(600)
    if (p.mask and p.mask_broadcast[2]) or (p.sink_tokens and 0 <= p.window_left < p.kv_len)
][:70]


def results_with(case: problems.Case, device: str, fill: float) -> tuple[Tensor, Tensor]:
    """With `fill` in the memory that no row may read, where `problems.build` has put NaN."""
    arguments, bases = case.arguments(device)
    for base in bases.values():
        if base.dtype in problems.DTYPES:
            base.masked_fill_(base.isnan(), fill)
    return getattr(torch.ops.fattn, case.problem.op)(**arguments)  # type: ignore[no-any-return]


@pytest.mark.parametrize("problem", UNSEEN, ids=str)
def test_masked_memory_never_affects_the_output(
    problem: problems.Problem, device: str, checked: Checked
) -> None:
    case = problems.build(problem)
    with checked():  # as in test_random, which has compiled most of these kernels
        results = results_with(case, device, torch.nan)
        assert same_bits(results, results_with(case, device, FINITE))
    assert not any(result.isnan().any() for result in results)


def test_the_problems_hide_keys_in_many_ways() -> None:
    """The control of the draw: keys between those that are seen, in every operator and format."""
    assert {p.op for p in UNSEEN} == {"prefill", "decode", "paged_decode", "paged_prefill", "varlen_prefill"}
    assert len({p.kv_format for p in UNSEEN}) >= 4 and any(p.tree for p in UNSEEN)
    assert any(max(p.head_dim, p.value_dim) > 128 for p in UNSEEN)
    hidden = 0
    for problem in UNSEEN:
        visible = problems.build(problem).visible
        seen = visible.view(problem.batch, problem.kv_heads, -1, problem.kv_len).any(2)
        hidden += bool((~seen & (seen.cumsum(-1) > 0) & (seen.flip(-1).cumsum(-1).flip(-1) > 0)).any())
    assert hidden >= 15, "the sample of random problems has changed: draw more of them"


@pytest.mark.parametrize("operand", ["key", "value"])
def test_a_visible_key_has_influence(operand: str, device: str) -> None:
    """The control of the comparison."""
    case = problems.build(
        problems.Problem(0, "decode", torch.float32, 1, 2, 2, 2, 40, 64, 64, mask=torch.bool)
    )
    visible = case.visible[0, 0].any(0).nonzero()
    clean = results_with(case, device, FINITE)
    side = case.operands[operand]
    side.of(side.base)[0, 0, int(visible[0])] = torch.nan
    dirty = results_with(case, device, torch.nan)
    assert not same_bits(dirty, clean)
    assert same_bits((dirty[0][:, 1], dirty[1][:, 1]), (clean[0][:, 1], clean[1][:, 1])), (
        "another head's keys"
    )


@pytest.mark.parametrize("dim", [64, 192])
@pytest.mark.parametrize("op", ["prefill", "decode"])
def test_a_bad_sequence_leaves_the_others_alone(op: str, dim: int, device: str) -> None:
    """A row of the bad sequence that sees no key is still 0."""
    case = problems.build(problems.Problem(3, op, torch.float16, 2, 4, 2, 5, 70, dim, dim, mask=torch.bool))
    case.operands["attn_mask"].of(case.operands["attn_mask"].base)[0, :, 2] = False
    clean = results_with(case, device, FINITE)
    for name in ("key", "value"):
        side = case.operands[name]
        side.of(side.base)[0] = torch.nan
    out, lse = results_with(case, device, torch.nan)
    assert same_bits((out[1:], lse[1:]), (clean[0][1:], clean[1][1:]))
    assert out[0, :, 2].eq(0).all() and out[0, :, 3].isnan().all()


# ---- each rule, taken out

ADDS_THE_MASK = ("return term == -INFINITY;", "return false;")
KERNELS = [
    *(("prefill", kernel) for kernel in ("fattn_prefill", "fattn_prefill_wide")),
    *(("decode", kernel) for kernel in ("fattn_decode", "fattn_decode_wide", "fattn_decode_vector")),
]
SEES_ALL_VALUES = ("seen.read = seen.all >>", "seen.read = ~0u >>")
SEES_ALL_OF_LANES = ("uint seen_here = seen >>", "uint seen_here = ~0u >>")
RULES = [
    (None, -torch.inf, "key", False),
    (None, -torch.inf, "value", False),
    (None, UNLIKELY, "value", True),
    (ADDS_THE_MASK, -torch.inf, "key", True),
    (SEES_ALL_VALUES, -torch.inf, "value", True),
]


@needs_emulator
@pytest.mark.parametrize(
    ("op", "kernel", "mutation", "hidden_by", "operand", "shows"),
    [(*kernel, *rule) for kernel in KERNELS for rule in RULES],
)
def test_each_rule_is_needed(
    op: str, kernel: str, mutation: tuple[str, str] | None, hidden_by: float, operand: str, shows: bool
) -> None:
    by_lanes = kernel == "fattn_decode_vector"

    def mutate(text: str) -> str:
        rule = SEES_ALL_OF_LANES if by_lanes and mutation is SEES_ALL_VALUES else mutation
        assert rule is None or text.count(rule[0]) == 1
        return text if rule is None else text.replace(*rule)

    dim, rows = 192 if kernel.endswith("_wide") else 64, 1 if by_lanes else 3
    problem = problems.Problem(0, op, torch.float32, 1, 2, 1, rows, 64, dim, dim, mask=torch.float32)
    case = problems.build(problem)
    mask, poison = torch.zeros_like(case.clean["attn_mask"]), case.clean[operand].clone()
    mask[..., BAD_KEY] = hidden_by
    poison[..., BAD_KEY, :] = torch.nan
    case.operands["attn_mask"] = problems.lay_out(mask, "contiguous")
    case.operands[operand] = problems.lay_out(poison, "contiguous")
    out, _ = direct_launch.run(case, {kernel: mutate}, checks="")
    assert out.isnan().all() if shows else out.isfinite().all()
