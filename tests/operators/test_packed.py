"""Packed queries, over packed keys and over a paged pool: batches of any shape, empty ones, their cost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import torch_fattn
from tests.conftest import counted_launches, needs_emulator
from tests.helpers import problems
from tests.helpers.accuracy import assert_close
from tests.helpers.problems import PACKED, Problem
from tests.helpers.tuned import tiles_of_large_calls

DEVICES = ["mps", "cpu"]


def case_of(op: str, dtype: torch.dtype = torch.float16, **fields: Any) -> problems.Case:
    """Rows `q_lens` over keys `seq_lens`, of as many rows where they are left out."""
    sizes: dict[str, Any] = {"q_heads": 4, "kv_heads": 2, "head_dim": 16, "value_dim": 24}
    if op == "paged_prefill":
        sizes |= {"block_size": 16, "causality": "bottom_right"}
    sizes |= {"seq_lens": fields["q_lens"]} | fields
    block = sizes.get("block_size", 1)
    sizes |= {"batch": len(sizes["q_lens"]), "q_len": max(sizes["q_lens"])}
    sizes["kv_len"] = -(-max(*sizes["seq_lens"], 1) // block) * block
    return problems.build(Problem(0, op, dtype, **sizes))


def check(
    op: str, device: str = "mps", dtype: torch.dtype = torch.float16, **fields: Any
) -> tuple[Tensor, Tensor]:
    case = case_of(op, dtype, **fields)
    with counted_launches() as launches:
        out, lse = (result.cpu() for result in getattr(torch.ops.fattn, op)(**case.arguments(device)[0]))
    assert launches == ({"fattn_prefill": 1} if device == "mps" else {})
    assert_close(case, out, lse)
    return out, lse


def int32(*values: int, device: str = "mps") -> Tensor:
    return torch.tensor(values, dtype=torch.int32).to(device)


def counters(case: problems.Case) -> dict[str, int]:
    """8x8x8 products, and bytes read of each operand."""
    import softmetal

    op, arguments = case.problem.op, case.arguments("mps")[0]
    slots = torch_fattn.explain(op, **arguments).passes[0]["bindings"]
    with softmetal.checks(count_bytes=True), softmetal.record() as launches:
        getattr(torch.ops.fattn, op)(**arguments)
    (ran,) = (launch for launch in launches if launch["kernel"] == "fattn_prefill")
    read = {name: ran["buffers_read"].get(str(slot), 0) for name, slot in slots.items()}
    return read | {"products": ran["counters"]["products"]}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("op", PACKED)
def test_many_sequences(op: str, device: str) -> None:
    """More than a simdgroup has lanes, three times, with runs of sequences that have no rows or no keys."""
    rows = [(n * 7) % 5 if n % 9 else 0 for n in range(100)]
    rows[40:75] = [0] * 35
    keys = [(n * 5) % 7 if n % 11 else 0 for n in range(100)]
    fields: dict[str, Any] = {"causality": "bottom_right"}
    if op == "paged_prefill":
        keys = [n + (i * 3) % 11 for i, n in enumerate(rows)]
        fields["block_size"] = 4
    check(op, device, q_heads=2, kv_heads=1, q_lens=tuple(rows), seq_lens=tuple(keys), **fields)


@pytest.mark.parametrize("device", DEVICES)
def test_no_keys_to_see(device: str) -> None:
    """No sequences, no keys, no capacity, no blocks: every row sees none."""
    query, key = (torch.randn(n, heads, 16, device=device) for n, heads in ((5, 4), (3, 2)))
    pool = torch.randn(3, 8, 2, 16, device=device)
    calls = []
    for sequences, keys, most in ((0, 3, 9), (2, 0, 9)):
        starts = int32(*range(0, 2 * sequences + 1, 2), device=device)
        calls.append(("varlen_prefill", (key[:keys], key[:keys], starts, starts, 2, most)))
    for sequences, max_blocks, blocks in ((0, 4, 3), (2, 0, 3), (2, 4, 0)):
        starts = int32(*range(0, 2 * sequences + 1, 2), device=device)
        tables = torch.zeros(sequences, max_blocks, dtype=torch.int32, device=device)
        lengths = torch.full((sequences,), 9, dtype=torch.int32, device=device)
        calls.append(("paged_prefill", (pool[:blocks], pool[:blocks], tables, lengths, starts, 2)))
    for op, operands in calls:
        out, lse = getattr(torch.ops.fattn, op)(query, *operands, is_causal=True)
        assert out.shape == (5, 4, 16) and torch.all(out.cpu() == 0)
        assert lse.shape == (4, 5) and torch.all(lse.cpu() == -torch.inf)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("op", PACKED)
def test_low_bounds_do_not_change_the_result(op: str, device: str) -> None:
    case = case_of(op, q_lens=(50, 1, 0, 9), seq_lens=(113, 65, 20, 37), causality="bottom_right")
    arguments = case.arguments(device)[0]
    bounds = [name for name in arguments if name.startswith("max_seqlen")]
    for call in (getattr(torch.ops.fattn, op).default, getattr(torch.ops.fattn, op).part):
        out, lse = call(**arguments)
        for most in (0, 1, 40):
            smaller = call(**arguments | dict.fromkeys(bounds, most))
            assert torch.equal(smaller[0].cpu(), out.cpu()) and torch.equal(smaller[1].cpu(), lse.cpu()), most
    out, lse = getattr(torch.ops.fattn, op)(**arguments | dict.fromkeys(bounds, 1))
    assert_close(case, out.cpu(), lse.cpu())


@pytest.mark.parametrize("empty", ["rows", "heads"])
@pytest.mark.parametrize("op", PACKED)
def test_empty_results_launch_nothing(op: str, empty: str) -> None:
    heads, rows = 0 if empty == "heads" else 4, 0 if empty == "rows" else 5
    query, pool = torch.randn(rows, heads, 16, device="mps"), torch.randn(3, 8, heads, 16, device="mps")
    key, starts = pool.flatten(0, 1), int32(0, rows)
    operands: tuple[Any, ...] = (key, key, starts, int32(0, 24), 5, 24)
    if op == "paged_prefill":
        operands = (pool, pool, int32(0, 1)[None], int32(9), starts, 5)
    with counted_launches() as launches:
        out, lse = getattr(torch.ops.fattn, op)(query, *operands, is_causal=True)
    assert launches == {} and out.shape == query.shape and lse.shape == query.shape[1::-1]


@needs_emulator
@pytest.mark.parametrize("op", PACKED)
def test_sequences_without_rows_cost_nothing(op: str) -> None:
    """Nor do spare rows: their tiles exist, but see no key."""
    few = case_of(op, q_lens=(40, 1), seq_lens=(64, 100))
    lengths = (96, 64, *[80] * 40, 100, 9)
    many = case_of(op, q_lens=(0, 40, *[0] * 40, 1, 0), seq_lens=lengths, spare_rows=100)
    # The tiles are the same whether or not the rows fill the GPU.
    with tiles_of_large_calls(few.problem):
        expected, found = counters(few), counters(many)
    assert (found["products"], found["key"]) == (expected["products"], expected["key"]) > (0, 0)


@needs_emulator
@pytest.mark.parametrize("op", PACKED)
@pytest.mark.parametrize(("sink_tokens", "steps"), [(0, 1), (4, 2)])
def test_a_window_is_all_that_is_loaded(op: str, sink_tokens: int, steps: int) -> None:
    """1,024 keys of each sequence, and at most one step more; of sink tokens, one step is enough."""
    options = {"window_left": 1023, "sink_tokens": sink_tokens, "causality": "bottom_right"}
    sizes = {"q_heads": 2, "kv_heads": 1, "head_dim": 64, "value_dim": 64}
    case = case_of(op, **sizes, q_lens=(1, 1), seq_lens=(3000, 2000), **options)
    assert 2 * 1024 * 64 * 2 <= counters(case)["key"] <= 2 * (1024 + 32 * steps) * 64 * 2
