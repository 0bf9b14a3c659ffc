"""Packed queries over packed keys: whose rows, whose keys, from which position, at what cost."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_fattn
from tests.conftest import Checked, counted_launches, needs_emulator
from tests.helpers import direct_launch, problems
from tests.helpers.problems import Problem
from tests.operators.test_packed import DEVICES, case_of, check, counters, int32

fattn = torch.ops.fattn
OP = "varlen_prefill"
f16, f32 = torch.float16, torch.float32
BOTTOM_RIGHT: dict[str, Any] = {"causality": "bottom_right"}


# ---- shapes of batches


@pytest.mark.parametrize("dtype", problems.DTYPES, ids=problems.SHORT.get)
@pytest.mark.parametrize(("q_heads", "kv_heads"), [(2, 2), (6, 2), (8, 1)])
@pytest.mark.parametrize("causal", [{}, BOTTOM_RIGHT], ids=["full", "causal"])
def test_prompts_of_different_lengths(
    causal: dict[str, Any], q_heads: int, kv_heads: int, dtype: torch.dtype
) -> None:
    """Groups of 3 do not divide a tile's rows; more rows than keys, fewer, and as many."""
    check(
        OP,
        dtype=dtype,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=64,
        value_dim=64,
        q_lens=(70, 1, 33, 0, 40, 5),
        seq_lens=(70, 150, 100, 20, 3, 0),
        spare_rows=3,
        **causal,
    )


@pytest.mark.parametrize("device", DEVICES)
def test_one_to_a_hundred(device: str) -> None:
    check(OP, device, q_heads=2, kv_heads=1, q_lens=(5, 500, 5), **BOTTOM_RIGHT)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("q_lens", "seq_lens"), [((3, 0, 20), (9, 40, 0)), ((0, 4, 0), (0, 0, 7))])
def test_empty_sequences(q_lens: tuple[int, ...], seq_lens: tuple[int, ...], device: str) -> None:
    """Sequences without rows, without keys, or without both: rows without keys are 0, with the sink's logit
    as lse."""
    check(OP, device, q_lens=q_lens, seq_lens=seq_lens, spare_rows=2, sinks=True)


# ---- positions and options


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("q_offset", [None, 0, 7, -3])
def test_where_the_rows_are(q_offset: int | None, device: str) -> None:
    """By default the last row of each sequence is at its last key; otherwise row 0 of each is at the
    offset."""
    causality = "bottom_right" if q_offset is None else "offset"
    for options in ({}, {"window_left": 9, "sink_tokens": 2}, {"alibi_slopes": True}):
        check(
            OP,
            device,
            q_lens=(30, 5, 40),
            seq_lens=(41, 60, 12),
            causality=causality,
            q_offset=q_offset,
            **options,
        )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "options",
    [
        {"window_left": 20, "window_right": 6},
        {"window_left": 40, "sink_tokens": 35, "sinks": True},
        {"softcap": 2.0, "alibi_slopes": True, "scale": 0.3},
        {"layouts": ("token_major", "every_other", "padded_rows")},
        {"layouts": ("expanded_heads", "expanded_heads", "offset")},
    ],
    ids=str,
)
def test_options(options: dict[str, Any], device: str) -> None:
    check(OP, device, q_lens=(50, 1, 90), seq_lens=(100, 65, 90), spare_rows=1, **BOTTOM_RIGHT, **options)


@pytest.mark.parametrize("is_causal", [False, True])
def test_each_sequence_is_as_in_prefill(is_causal: bool, device: str) -> None:
    """Bit by bit as alone, in a batch of any other sequences."""
    generator = torch.Generator().manual_seed(2)
    rows, keys = (37, 0, 100, 1, 64), (50, 9, 100, 33, 0)
    query = torch.randn(sum(rows), 2, 64, generator=generator).to(f16).to(device)
    key, value = (torch.randn(sum(keys), 2, 64, generator=generator).to(f16).to(device) for _ in range(2))
    starts = [0, *accumulate(rows)], [0, *accumulate(keys)]
    out, lse = fattn.varlen_prefill(
        query, key, value, *(int32(*s, device=device) for s in starts), 100, 100, is_causal=is_causal
    )
    for (first, end), (first_key, end_key) in zip(*(pairwise(s) for s in starts), strict=True):
        alone = (t.transpose(0, 1)[None] for t in (query[first:end], key[first_key:end_key]))
        mine, its_lse = fattn.prefill(
            *alone, value[first_key:end_key].transpose(0, 1)[None], is_causal=is_causal
        )
        assert torch.equal(out[first:end].cpu(), mine[0].transpose(0, 1).cpu())
        assert torch.equal(lse[:, first:end].cpu(), its_lse[0].cpu())


# ---- starts that the host does not know


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("of_rows", "of_keys"),
    [
        ((0, 20, 10, 40), (0, 30, 20, 50)),
        ((-5, 20, 2**31 - 1, 40), (-(2**31), 10, 2**31 - 1, 50)),
        ((40, 30, 20, 10), (50, 40, 2**31 - 1, -(2**31))),
        ((7, 7, 7, 7), (0, 50, 0, 50)),
    ],
)
def test_starts_out_of_order_and_out_of_range(
    of_rows: tuple[int, ...], of_keys: tuple[int, ...], device: str, checked: Checked
) -> None:
    """Nothing outside is read or written, and every row has a result: those of the reference."""
    generator = torch.Generator().manual_seed(7)
    query = torch.randn(45, 4, 16, generator=generator)
    key, value = torch.randn(2, 55, 2, 16, generator=generator)
    for most in (60, 25):
        arguments = (
            query,
            key,
            value,
            int32(*of_rows, device="cpu"),
            int32(*of_keys, device="cpu"),
            60,
            most,
        )
        exact, exact_lse = torch_fattn.reference.varlen_prefill(*arguments, is_causal=True)
        on_device = (a.to(device) if isinstance(a, Tensor) else a for a in arguments)
        with checked():
            out, lse = fattn.varlen_prefill(*on_device, is_causal=True)
        assert torch.allclose(out.cpu().double(), exact, atol=1e-5)
        assert torch.allclose(lse.cpu().double(), exact_lse, atol=1e-5)


# ---- cost


def needed_products(problem: Problem) -> int:
    """The products that touch a visible pair, with eight (row, head) pairs that share keys per fragment."""
    group = problem.q_heads // problem.kv_heads
    blocks = 0
    for rows, keys, first in zip(problem.rows, problem.lengths, problem.first_positions, strict=True):
        for pair in range(0, rows * group, 8):
            last_row = (min(pair + 8, rows * group) - 1) // group
            end = min(first + last_row + 1, keys) if problem.is_causal else keys
            blocks += max(0, -(-end // 8))
    return problem.kv_heads * blocks * (problem.head_dim + problem.value_dim) // 8


@needs_emulator
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("causal", [{}, BOTTOM_RIGHT], ids=["full", "causal"])
@pytest.mark.parametrize(("q_heads", "kv_heads"), [(2, 2), (4, 1)])
def test_no_work_on_padding(q_heads: int, kv_heads: int, causal: dict[str, Any], head_dim: int) -> None:
    """One sequence of 320 among some of 5: a padded batch would do ten times as much."""
    lengths = (5, 320, 5, 0, 5, 5, 5, 5, 5, 5)
    case = case_of(
        OP,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=head_dim,
        q_lens=lengths,
        **causal,
    )
    products = counters(case)["products"]
    assert 1.0 <= products / needed_products(case.problem) <= 1.1
    padded = 10 * 320 * 320 // 64 * q_heads * 2 * head_dim // 8
    assert products < 0.12 * padded


@pytest.mark.host_only
@pytest.mark.parametrize("batch", [1, 10, 1000])
@pytest.mark.parametrize("rows", [0, 1, 63, 64, 65, 1000])
def test_the_grid_is_at_most_slightly_too_large(rows: int, batch: int) -> None:
    """However the rows are shared out, there are tiles for all of them, and at most batch + 1 too many."""
    query = torch.empty(rows * batch + 9, 8, 64, dtype=f16, device="meta")
    key = torch.empty(rows * batch, 2, 64, dtype=f16, device="meta")
    starts = torch.empty(batch + 1, dtype=torch.int32, device="meta")
    (step,) = torch_fattn.explain("varlen_prefill", query, key, key, starts, starts, 10**6, 10**6).passes
    tile_rows = 8 * int(step["macros"]["FATTN_ROW_FRAGMENTS"]) * int(step["macros"]["FATTN_SIMDGROUPS"])
    tiles, heads, _ = step["grid"]
    group, total = 4, query.shape[0]
    for lengths in ([rows] * batch, [total, *[0] * (batch - 1)], [1] * min(batch, total)):
        spare = total - sum(lengths)
        needed = sum(-(-n * group // tile_rows) for n in (*lengths, spare))
        assert heads == 2 and needed <= tiles <= needed + batch + 1


@pytest.mark.host_only
@pytest.mark.parametrize("longest", [4096, 2**62, 2**63 - 1])
def test_no_sequence_is_longer_than_the_call(longest: int) -> None:
    """Even if max_seqlen_q is larger: max_seqlen_q times the heads of a group exceeds 64 bits here."""
    query = torch.empty(4096, 8, 64, dtype=f16, device="meta")
    key, pool = query[:, :2], query.new_empty(256, 16, 2, 64)
    starts, lengths = (torch.empty(n, dtype=torch.int32, device="meta") for n in (2, 1))
    tables = torch.empty(1, 256, dtype=torch.int32, device="meta")

    def plans(longest: int) -> list[str]:
        operands: dict[str, tuple[torch.Tensor, ...]] = {
            "varlen_prefill": (query, key, key, starts, starts),
            "paged_prefill": (query, pool, pool, tables, lengths, starts),
        }
        numbers = {"varlen_prefill": (longest, 4096), "paged_prefill": (longest,)}
        return [torch_fattn.explain(op, *operands[op], *numbers[op], is_causal=True).json for op in operands]

    assert plans(longest) == plans(4096) != plans(1)


def test_slices_compute_what_one_dispatch_does() -> None:
    """Slices, and parts of the keys, are planned from max_seqlen_k: only the GPU knows how many there are."""
    generator = torch.Generator().manual_seed(4)
    query = torch.randn(140, 16, 64, generator=generator).to(f16).to("mps")
    key = torch.randn(1, 8, 64, generator=generator).to(f16).to("mps").expand(2**29, -1, -1)
    starts = int32(0, 130, 140), int32(0, 1400, 1437)
    results = []
    for most, parts in ((2**25, 4), (2**23, 1), (1400, 1)):
        arguments = (query, key, key, *starts, 130, most)
        step, *merge = torch_fattn.explain("varlen_prefill", *arguments).passes
        dispatches = len(list(direct_launch.dispatches(step)))
        assert (dispatches > 1) == (most > 1400) and step["params"]["parts"] == parts
        with counted_launches() as launches:
            results.append([result.cpu() for result in fattn.varlen_prefill(*arguments)])
        assert launches == {"fattn_prefill": dispatches} | ({"fattn_merge": 1} if merge else {})
    assert all(torch.equal(a, b) for more in results[:2] for a, b in zip(more, results[2], strict=True))
