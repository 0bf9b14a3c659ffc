"""Packed queries of mixed lengths over a paged pool: whose rows, which blocks, at what cost."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_fattn
from tests.conftest import Checked, needs_emulator
from tests.helpers import problems
from tests.operators.test_packed import DEVICES, case_of, check, counters, int32

fattn = torch.ops.fattn
OP = "paged_prefill"
f16, f32 = torch.float16, torch.float32


# ---- shapes of batches


@pytest.mark.parametrize("dtype", problems.DTYPES, ids=problems.SHORT.get)
@pytest.mark.parametrize(("q_heads", "kv_heads"), [(2, 2), (6, 2), (8, 1)])
def test_a_prompt_a_chunk_and_tokens(q_heads: int, kv_heads: int, dtype: torch.dtype) -> None:
    """Groups of 3 do not divide a tile's rows; 8 fill a fragment with one token."""
    check(
        OP,
        dtype=dtype,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=64,
        value_dim=64,
        q_lens=(70, 1, 33, 0, 1),
        seq_lens=(70, 150, 100, 20, 1),
    )


def test_one_to_a_thousand() -> None:
    check(OP, q_heads=2, kv_heads=1, q_lens=(1, 1000, 1), seq_lens=(700, 1000, 3))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("spare", [1, 200])
def test_rows_of_no_sequence(spare: int, device: str) -> None:
    """They hold NaN, and get the result of a row that sees no key: with a sink its logit."""
    check(OP, device, q_lens=(3, 20), seq_lens=(9, 20), spare_rows=spare, sinks=True)


@pytest.mark.parametrize("device", DEVICES)
def test_more_rows_than_keys(device: str) -> None:
    """Rows at positions below 0 see nothing, and neither do those of an empty sequence."""
    out, lse = check(OP, device, q_lens=(6, 5, 40), seq_lens=(2, 0, 35))
    assert torch.all(out[:4] == 0) and torch.all(lse[:, :4] == -torch.inf) and lse[:, 4:6].isfinite().all()
    assert torch.all(out[6:16] == 0) and torch.all(lse[:, 11:16] == -torch.inf)


# ---- blocks


@pytest.mark.parametrize("block_size", [1, 3, 8, 12, 16, 24, 32, 64, 100, 256])
@pytest.mark.parametrize("head_dim", [16, 128])
def test_block_sizes(block_size: int, head_dim: int) -> None:
    """Block sizes that divide a step, are multiples of one, or neither; in both orders of heads and slots."""
    for head_major in (False, True):
        check(
            OP,
            head_dim=head_dim,
            q_lens=(50, 1, 7),
            seq_lens=(90, 65, 32),
            block_size=block_size,
            head_major_pool=head_major,
        )


@pytest.mark.parametrize("device", DEVICES)
def test_sequences_share_blocks(device: str) -> None:
    """A common prefix of two blocks, and one sequence that is the prefix of another."""
    generator = torch.Generator().manual_seed(3)
    pool = torch.randn(2, 6, 16, 2, 16, generator=generator).to(device)
    query = torch.randn(30, 4, 16, generator=generator).to(device)
    tables = torch.tensor([[4, 1, 3, -1], [4, 1, 0, 5], [4, 1, -1, -1]], dtype=torch.int32).to(device)
    lengths, starts = int32(44, 63, 32, device=device), int32(0, 9, 10, 30, device=device)
    arguments = (query, *pool, tables, lengths, starts, 20)
    out, lse = fattn.paged_prefill(*arguments, is_causal=True)
    exact, exact_lse = torch_fattn.reference.paged_prefill(*arguments, is_causal=True)
    assert torch.allclose(out.cpu().double(), exact, atol=1e-5)
    assert torch.allclose(lse.cpu().double(), exact_lse, atol=1e-5)


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


# ---- agreement with other operators


def cache(
    lengths: list[int], block_size: int = 16, device: str = "mps"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """key_cache, value_cache, block_tables and seq_lens, the same for the same lengths."""
    generator = torch.Generator().manual_seed(sum(lengths))
    blocks = [-(-length // block_size) for length in lengths]
    pools = torch.randn(2, sum(blocks), block_size, 2, 32, generator=generator).to(f16)
    tables = torch.full((len(lengths), max(blocks)), -1, dtype=torch.int32)
    for b, (end, count) in enumerate(zip(accumulate(blocks), blocks, strict=True)):
        tables[b, :count] = torch.arange(end - count, end)
    return pools[0].to(device), pools[1].to(device), tables.to(device), int32(*lengths, device=device)


@pytest.mark.parametrize("options", [{}, {"window_left": 50, "sink_tokens": 3}, {"softcap": 3.0}], ids=str)
def test_tokens_are_as_in_paged_decode(options: dict[str, Any], device: str) -> None:
    keys = cache([200, 33, 90], device=device)
    query = torch.randn(3, 8, 32).to(f16).to(device)
    starts = int32(0, 1, 2, 3, device=device)
    packed, packed_lse = fattn.paged_prefill(query, *keys, starts, 1, is_causal=True, **options)
    out, lse = fattn.paged_decode(query[:, :, None], *keys, **options)
    assert torch.allclose(packed.cpu(), out[:, :, 0].cpu(), atol=2e-3)
    assert torch.allclose(packed_lse.mT.cpu(), lse[:, :, 0].cpu(), atol=1e-3)


def test_chunks_make_the_whole(device: str) -> None:
    """A prompt in chunks of any size, while its cache grows: the same bits as in one call."""
    pools = cache([150], device=device)
    query = torch.randn(150, 8, 32).to(f16).to(device)
    whole, _ = fattn.paged_prefill(query, *pools, int32(0, 150, device=device), 150, is_causal=True)
    first = 0
    for end in (1, 40, 104, 120, 150):
        keys = (*pools[:3], int32(end, device=device))
        starts = int32(0, end - first, device=device)
        out, _ = fattn.paged_prefill(query[first:end], *keys, starts, end - first, is_causal=True)
        assert torch.equal(out.cpu(), whole[first:end].cpu()), (first, end)
        first = end


@pytest.mark.parametrize(("head_dim", "count"), [(32, 3), (128, 3), (136, 2)])
@pytest.mark.parametrize("options", [{}, {"window_left": 30, "sink_tokens": 2}], ids=str)
def test_a_result_depends_on_its_sequence_alone(
    options: dict[str, Any], head_dim: int, count: int, device: str
) -> None:
    """Bit by bit: alone, in any place of a batch, whatever the capacity and the longest of the others."""
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(count, 8, head_dim, generator=generator).to(f16)
    key, value = torch.randn(2, 80, 2, head_dim, generator=generator).to(f16)

    def run(place: int, others: list[int], max_blocks: int, most: int) -> list[Tensor]:
        rows = [*others[:place], count, *others[place:]]
        starts = [0, *accumulate(rows)]
        queries = torch.randn(starts[-1], 8, head_dim).to(f16)
        queries[starts[place] : starts[place + 1]] = query
        pools = torch.randn(2, 20, 16, 2, head_dim).to(f16)
        tables = torch.randint(0, 10, (len(rows), max_blocks), dtype=torch.int32)
        tables[place, :5] = torch.tensor([19, 11, 13, 12, 17])
        for pool, dense in zip(pools, (key, value), strict=True):
            pool[tables[place, :5].long()] = dense.view(5, 16, 2, head_dim)
        lengths = int32(*(80 if b == place else 60 for b in range(len(rows))), device=device)
        tensors = (t.to(device) for t in (queries, *pools, tables))
        packing = (int32(*starts, device=device), most)
        out, lse = fattn.paged_prefill(*tensors, lengths, *packing, is_causal=True, **options)
        mine = slice(starts[place], starts[place + 1])
        return [out[mine].cpu(), lse[:, mine].cpu()]

    alone = run(0, [], 5, count)
    for place, others, max_blocks, most in (
        (1, [1, 1], 5, 3),
        (2, [60, 1, 5], 9, 60),
        (0, [2, 0, 70], 6, 1000),
    ):
        both = zip(alone, run(place, others, max_blocks, most), strict=True)
        assert all(torch.equal(a, b) for a, b in both), (place, others)


# ---- cost


@needs_emulator
@pytest.mark.parametrize("q_heads", [2, 8, 32])
def test_a_token_reads_its_keys_once_for_all_heads(q_heads: int) -> None:
    case = case_of(OP, q_heads=q_heads, head_dim=64, value_dim=64, q_lens=(1, 1), seq_lens=(300, 90))
    found = counters(case)
    assert found["key"] == (300 + 90) * 2 * 64 * 2
    fragments = -(-300 // 8) + -(-90 // 8)
    assert found["products"] <= 1.1 * fragments * 2 * 16 * -(-q_heads // 16)
    # Two simdgroups look up separately; a step of 32 keys has two blocks.
    threads = 128
    assert found["block_tables"] <= (10 + 3) * 2 * 2 * threads * 4


@needs_emulator
@pytest.mark.parametrize(("kv_format", "row_bytes"), [("int8", 64), ("fp8_e4m3", 64), ("int4", 32)])
def test_a_quantised_pool_is_read_as_it_is_stored(kv_format: str, row_bytes: int) -> None:
    """Once, by a tile for each sequence."""
    case = case_of(
        OP, q_heads=8, head_dim=64, value_dim=64, q_lens=(1, 8), seq_lens=(300, 90), kv_format=kv_format
    )
    assert counters(case)["key"] == (300 + 90) * 2 * row_bytes
