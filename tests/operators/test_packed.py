"""Packed queries, over packed keys and over a paged pool: many sequences, bounds that are too low, blocks of
the pool, starts that the host does not know, and what they cost."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_fattn
from tests.conftest import Checked, needs_emulator
from tests.helpers import problems, small_problems
from tests.helpers.accuracy import assert_close
from tests.helpers.kv_formats import QUANTISED, columns
from tests.helpers.problems import PACKED, Problem
from tests.helpers.tuned import tiles_of_large_calls

fattn = torch.ops.fattn
f16 = torch.float16
small = partial(small_problems.problem, dtype=f16, head_dim=16, value_dim=24)
check = partial(small_problems.check, kernels=("fattn_prefill",))


def int32(*values: int, device: str = "mps") -> Tensor:
    return torch.tensor(values, dtype=torch.int32).to(device)


def counters(problem: Problem) -> dict[str, int]:
    """8x8x8 products, and bytes read of each operand."""
    import softmetal

    arguments = problems.build(problem).arguments("mps")[0]
    slots = torch_fattn.explain(problem.op, **arguments).passes[0]["bindings"]
    with softmetal.checks(count_bytes=True), softmetal.record() as launches:
        getattr(fattn, problem.op)(**arguments)
    (ran,) = (launch for launch in launches if launch["kernel"] == "fattn_prefill")
    read = {name: ran["buffers_read"].get(str(slot), 0) for name, slot in slots.items()}
    return read | {"products": ran["counters"]["products"]}


# ---- shapes of batches


@pytest.mark.parametrize("op", PACKED)
def test_many_sequences(op: str, device: str) -> None:
    """More than a simdgroup has lanes, three times, with runs of sequences that have no rows or no keys."""
    rows = [(n * 7) % 5 if n % 9 else 0 for n in range(100)]
    rows[40:75] = [0] * 35
    keys = [(n * 5) % 7 if n % 11 else 0 for n in range(100)]
    block_size = 0
    if op == "paged_prefill":
        keys = [n + (i * 3) % 11 for i, n in enumerate(rows)]
        block_size = 4
    sizes = {"q_heads": 2, "kv_heads": 1, "block_size": block_size}
    check(small(op, **sizes, q_lens=tuple(rows), seq_lens=tuple(keys)), device)


@pytest.mark.parametrize("op", PACKED)
def test_low_bounds_do_not_change_the_result(op: str, device: str) -> None:
    case = problems.build(small(op, q_lens=(50, 1, 0, 9), seq_lens=(113, 65, 20, 37)))
    arguments = case.arguments(device)[0]
    bounds = [name for name in arguments if name.startswith("max_seqlen")]
    for call in (getattr(fattn, op).default, getattr(fattn, op).part):
        out, lse = call(**arguments)
        for most in (0, 1, 40):
            smaller = call(**arguments | dict.fromkeys(bounds, most))
            assert torch.equal(smaller[0].cpu(), out.cpu()) and torch.equal(smaller[1].cpu(), lse.cpu()), most
    out, lse = getattr(fattn, op)(**arguments | dict.fromkeys(bounds, 1))
    assert_close(case, out.cpu(), lse.cpu())


# ---- blocks of a pool


@pytest.mark.parametrize("block_size", [3, 24, 64, 100])
@pytest.mark.parametrize("head_dim", [16, 128])
def test_block_sizes(block_size: int, head_dim: int) -> None:
    """Block sizes that are no power of two, or several steps; random problems have the others."""
    sizes = {"head_dim": head_dim, "q_lens": (50, 1, 7), "seq_lens": (90, 65, 32)}
    for head_major in (False, True):
        check(small("paged_prefill", **sizes, block_size=block_size, head_major_pool=head_major))


@pytest.mark.parametrize("block_size", [4, 16, 32])
@pytest.mark.parametrize("bad", [-1, 99, -(2**31), 2**31 - 1])
def test_entries_outside_the_pool_are_hidden(bad: int, block_size: int, checked: Checked) -> None:
    """The sequence is the first, in the middle, and the last, among keys that every row sees."""
    generator = torch.Generator().manual_seed(3)
    blocks = 160 // block_size
    pool = torch.randn(2, blocks, block_size, 2, 16, generator=generator).to("mps")
    query = torch.randn(8, 4, 16, generator=generator).to("mps")
    table = torch.randperm(blocks, generator=generator).to(torch.int32)
    table[torch.tensor([0, blocks // 2, blocks - 1])] = bad
    arguments = (query, *pool, table[None].to("mps"), int32(160), int32(0, 8), 8)
    with checked():
        out = fattn.paged_prefill(*arguments, is_causal=True)[0].cpu()
    exact, _ = torch_fattn.reference.paged_prefill(*arguments, is_causal=True)
    assert torch.allclose(out.double(), exact, atol=1e-5)


def test_chunks_make_the_whole(device: str) -> None:
    """A prompt in chunks of any size, while its cache grows: the same bits as in one call."""
    generator = torch.Generator().manual_seed(150)
    pools = torch.randn(2, 10, 16, 2, 32, generator=generator).to(f16).to(device)
    table = torch.arange(10, dtype=torch.int32, device=device)[None]
    query = torch.randn(150, 8, 32, generator=generator).to(f16).to(device)

    def of_rows(first: int, end: int) -> Tensor:
        lengths, starts = int32(end, device=device), int32(0, end - first, device=device)
        rows = query[first:end]
        out, _ = fattn.paged_prefill(rows, *pools, table, lengths, starts, end - first, is_causal=True)
        return out.cpu()

    whole, first = of_rows(0, 150), 0
    for end in (1, 40, 104, 120, 150):
        assert torch.equal(of_rows(first, end), whole[first:end]), (first, end)
        first = end


# ---- starts that the host does not know


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
    starts = int32(*of_rows, device="cpu"), int32(*of_keys, device="cpu")
    for most in (60, 25):
        arguments = (query, key, value, *starts, 60, most)
        exact, exact_lse = torch_fattn.reference.varlen_prefill(*arguments, is_causal=True)
        on_device = (a.to(device) if isinstance(a, Tensor) else a for a in arguments)
        with checked():
            out, lse = fattn.varlen_prefill(*on_device, is_causal=True)
        assert torch.allclose(out.cpu().double(), exact, atol=1e-5)
        assert torch.allclose(lse.cpu().double(), exact_lse, atol=1e-5)


# ---- cost


@needs_emulator
@pytest.mark.parametrize("op", PACKED)
def test_sequences_without_rows_cost_nothing(op: str) -> None:
    """Nor do spare rows: their tiles exist, but see no key."""
    few = small(op, q_lens=(40, 1), seq_lens=(64, 100))
    lengths = (96, 64, *[80] * 40, 100, 9)
    many = small(op, q_lens=(0, 40, *[0] * 40, 1, 0), seq_lens=lengths, spare_rows=100)
    # The tiles are the same whether or not the rows fill the GPU.
    with tiles_of_large_calls(few):
        expected, found = counters(few), counters(many)
    assert (found["products"], found["key"]) == (expected["products"], expected["key"]) > (0, 0)


@needs_emulator
@pytest.mark.parametrize("op", PACKED)
@pytest.mark.parametrize(("sink_tokens", "steps"), [(0, 1), (4, 2)])
def test_a_window_is_all_that_is_loaded(op: str, sink_tokens: int, steps: int) -> None:
    """1,024 keys of each sequence, and at most one step more; of sink tokens, one step is enough."""
    sizes: dict[str, Any] = {"q_heads": 2, "kv_heads": 1, "head_dim": 64, "value_dim": 64}
    sizes |= {"q_lens": (1, 1), "seq_lens": (3000, 2000)}
    read = counters(small(op, **sizes, window_left=1023, sink_tokens=sink_tokens))["key"]
    assert 2 * 1024 * 64 * 2 <= read <= 2 * (1024 + 32 * steps) * 64 * 2


@needs_emulator
@pytest.mark.parametrize("q_heads", [2, 8, 32])
def test_a_token_reads_its_keys_once_for_all_heads(q_heads: int) -> None:
    sizes = {"q_heads": q_heads, "head_dim": 64, "value_dim": 64}
    found = counters(small("paged_prefill", **sizes, q_lens=(1, 1), seq_lens=(300, 90)))
    assert found["key"] == (300 + 90) * 2 * 64 * 2
    fragments = -(-300 // 8) + -(-90 // 8)
    assert found["products"] <= 1.1 * fragments * 2 * 16 * -(-q_heads // 16)
    # Two simdgroups look up separately; a step of 32 keys has two blocks.
    threads = 128
    assert found["block_tables"] <= (10 + 3) * 2 * 2 * threads * 4


@needs_emulator
@pytest.mark.parametrize("kv_format", QUANTISED)
def test_a_quantised_pool_is_read_as_it_is_stored(kv_format: str) -> None:
    """Once, by a tile for each sequence."""
    sizes = {"q_heads": 8, "head_dim": 64, "value_dim": 64, "kv_format": kv_format}
    found = counters(small("paged_prefill", **sizes, q_lens=(1, 8), seq_lens=(300, 90)))
    assert found["key"] == (300 + 90) * 2 * columns(kv_format, 64)


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
@pytest.mark.parametrize("causality", ["none", "bottom_right"], ids=["full", "causal"])
@pytest.mark.parametrize(("q_heads", "kv_heads"), [(2, 2), (4, 1)])
def test_no_work_on_padding(q_heads: int, kv_heads: int, causality: str, head_dim: int) -> None:
    """One sequence of 320 among some of 5: a padded batch would do ten times as much."""
    lengths = (5, 320, 5, 0, 5, 5, 5, 5, 5, 5)
    sizes = {"q_heads": q_heads, "kv_heads": kv_heads, "head_dim": head_dim, "value_dim": head_dim}
    problem = small("varlen_prefill", **sizes, q_lens=lengths, seq_lens=lengths, causality=causality)
    products = counters(problem)["products"]
    assert 1.0 <= products / needed_products(problem) <= 1.1
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
