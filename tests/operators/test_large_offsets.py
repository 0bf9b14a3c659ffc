"""Caches beyond 2^32 elements: offsets are 64-bit all the way. Needs 9 GB of memory, hence a sweep.

Only the kernels under test use such offsets. The cache is filled by copies of small contiguous pieces, which
torch makes as blits: its strided copies into views past 4 GiB have been seen to abort on Macs.
"""

from __future__ import annotations

import itertools
import os
import sys
from typing import Any

import pytest
import torch

import torch_fattn
from tests.conftest import counted_launches, decodes
from tests.helpers.linear_problems import CONV, RULE, STEP, call_of

ELEMENTS = 2**32 + 2**20
HEAD_DIM = 64


@pytest.fixture(scope="module")
def memory() -> torch.Tensor:
    # On a Mac the GPU may use about two thirds of the memory, some of which the system needs.
    needed = 24 if sys.platform == "darwin" else 14
    present = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    if present < 0.9 * needed:
        pytest.skip(f"needs a machine with {needed} GiB of memory, this one has {present:.0f}")
    return torch.empty(ELEMENTS, dtype=torch.float16, device="mps")


def close(out: torch.Tensor, exact: torch.Tensor) -> bool:
    return torch.allclose(out.cpu().double(), exact, atol=2e-3)


def test_paged_decode_at_the_end_of_a_huge_pool(memory: torch.Tensor) -> None:
    block_size = 16
    pool = memory[: ELEMENTS // (block_size * HEAD_DIM) * block_size * HEAD_DIM]
    pool = pool.view(-1, block_size, 1, HEAD_DIM)
    blocks = torch.tensor([[pool.shape[0] - 1, 3, pool.shape[0] - 7]], dtype=torch.int32)
    small = torch.randn(3, block_size, 1, HEAD_DIM, dtype=torch.float16)
    for block, content in zip(blocks[0].tolist(), small, strict=True):
        pool[block].copy_(content)
    query = torch.randn(1, 4, 1, HEAD_DIM, dtype=torch.float16)
    seq_lens = torch.tensor([41], dtype=torch.int32)
    with counted_launches() as launches:
        out = torch_fattn.paged_decode(query.to("mps"), pool, pool, blocks.to("mps"), seq_lens.to("mps"))
    assert decodes(launches) == 1
    order = torch.tensor([[0, 1, 2]], dtype=torch.int32)
    exact, _ = torch_fattn.reference.paged_decode(query, small, small, order, seq_lens)
    assert close(out, exact)


@pytest.mark.parametrize("op", ["prefill", "decode"])
def test_dense_strides_and_offsets_past_32_bits(memory: torch.Tensor, op: str) -> None:
    rows, length = 2, 33
    batch_stride = 2**32 - 2**16
    keys = memory.as_strided((rows, 1, length, HEAD_DIM), (batch_stride, 1, HEAD_DIM, 1), 8 * HEAD_DIM)
    content = torch.randn(rows, 1, length, HEAD_DIM, dtype=torch.float16)
    for row in range(rows):
        keys[row].copy_(content[row])
    last = memory[-length * HEAD_DIM :].view(1, 1, length, HEAD_DIM).expand(rows, -1, -1, -1)
    values = torch.randn(1, 1, length, HEAD_DIM, dtype=torch.float16)
    memory[-length * HEAD_DIM :].view(1, 1, length, HEAD_DIM).copy_(values)
    query = torch.randn(rows, 2, 5, HEAD_DIM, dtype=torch.float16)
    out = getattr(torch_fattn, op)(query.to("mps"), keys, last)
    exact, _ = getattr(torch_fattn.reference, op)(query, content, values.expand(rows, -1, -1, -1))
    assert close(out, exact)


def test_packed_keys_past_32_bits(memory: torch.Tensor) -> None:
    row_stride, lengths = 2**26 - 2**8, (40, 23)
    keys = memory.as_strided((sum(lengths), 1, HEAD_DIM), (row_stride, HEAD_DIM, 1), HEAD_DIM)
    content = torch.randn(sum(lengths), 1, HEAD_DIM, dtype=torch.float16)
    for row in range(sum(lengths)):
        keys[row].copy_(content[row])
    query = torch.randn(12, 2, HEAD_DIM, dtype=torch.float16)
    starts = torch.tensor([0, 5, 12], dtype=torch.int32), torch.tensor([0, 40, 63], dtype=torch.int32)
    on_device = (tensor.to("mps") for tensor in starts)
    out = torch_fattn.varlen_prefill(query.to("mps"), keys, keys, *on_device, 7, 40)
    exact, _ = torch_fattn.reference.varlen_prefill(query, content, content, *starts, 7, 40)
    assert close(out, exact)


@pytest.mark.parametrize(
    ("op", "batch", "length", "strides"),
    [
        (RULE, 1, 63, (1, 2**26 - 2**8)),
        (CONV, 1, 63, (1, 2**26 - 2**8)),
        (STEP, 2, 16, (2**32 - 2**16, 2**10)),
    ],
)
def test_linear_attention_past_32_bits(
    memory: torch.Tensor, op: str, batch: int, length: int, strides: tuple[int, int]
) -> None:
    sizes: dict[str, Any] = {"dims": (HEAD_DIM, HEAD_DIM), "channels": HEAD_DIM, "key_heads": 1, "group": 1}
    sizes |= {"batch": batch, "length": length, "dtype": torch.float16, "layout": "contiguous"}
    call = call_of(op, "cpu", **sizes, channel_decay=False, use_qk_l2norm_in_kernel=True)
    on_device = {name: x.to("mps") if isinstance(x, torch.Tensor) else x for name, x in call.items()}
    for n, name in enumerate(each for each in ("query", "key", "value", "z", "x") if each in call):
        content = call[name]
        rows = memory.as_strided(content.shape, (*strides, *content.stride()[2:]), n * HEAD_DIM)
        for sequence, token in itertools.product(range(batch), range(length)):
            rows[sequence, token].copy_(content[sequence, token])
        on_device[name] = rows
    out = getattr(torch_fattn, op)(**on_device)
    exact = getattr(torch_fattn.reference, op)(**call)
    assert torch.allclose(out.cpu().double(), exact, rtol=2e-3, atol=2e-3)
