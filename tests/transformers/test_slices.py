"""Prompts in slices for decode mean what prefill and paged_prefill mean."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import torch_fattn
from tests.transformers.tiny_models import DEVICE
from torch_fattn import reference
from torch_fattn._ops import MAX_DECODE_ROWS, MAX_PREFILL_HEAD_DIM
from torch_fattn.integrations.transformers import slices

TOLERANCE = 1e-5
OPTIONS: dict[str, Any] = {"scale": 0.1, "softcap": 2.0}
# Hq, Hkv, Lq, Lk, D, Dv
SIZES = [(4, 2, 37, 50, 192, 128), (8, 1, 17, 20, 256, 256), (2, 2, 48, 48, 64, 136)]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def operands(size: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    heads, kv_heads, q_len, kv_len, dim, value_dim = size
    query = torch.randn(2, heads, q_len, dim, device=DEVICE)
    key = torch.randn(2, kv_heads, kv_len, dim, device=DEVICE)
    value = torch.randn(2, kv_heads, kv_len, value_dim, device=DEVICE)
    return query, key, value, {**OPTIONS, "sinks": torch.randn(heads, device=DEVICE)}


def error(mine: Tensor, theirs: Tensor) -> float:
    return (mine.cpu().double() - theirs.double()).abs().max().item()


def left_padding(kv_len: int) -> Tensor:
    padding = torch.zeros(2, 1, 1, kv_len, device=DEVICE)
    padding[0, ..., :5] = -torch.inf
    return padding


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("window_left", [-1, 7])
@pytest.mark.parametrize("size", SIZES)
def test_causal(size: tuple[int, ...], window_left: int, padded: bool) -> None:
    query, key, value, options = operands(size)
    mask = left_padding(key.shape[2]) if padded else None
    mine = slices.prefill_causal(query, key, value, None, mask, window_left=window_left, **options)
    theirs = reference.prefill(query, key, value, mask, is_causal=True, window_left=window_left, **options)[0]
    assert error(mine, theirs) < TOLERANCE


@pytest.mark.parametrize("window_left", [-1, 7])
@pytest.mark.parametrize("size", SIZES[:2])
def test_lengths_on_the_device(size: tuple[int, ...], window_left: int) -> None:
    query, key, value, options = operands(size)
    lens = [key.shape[2] - 3, query.shape[2]]
    for sequence, filled in enumerate(lens):
        key[sequence, :, filled:] = value[sequence, :, filled:] = torch.nan
    seq_lens = torch.tensor(lens, dtype=torch.int32, device=DEVICE)
    mine = slices.prefill_causal(query, key, value, seq_lens, None, window_left=window_left, **options)
    for b, filled in enumerate(lens):
        mine_b, *others = (t[b : b + 1] for t in (mine, query, key[:, :, :filled], value[:, :, :filled]))
        theirs = reference.prefill(*others, is_causal=True, window_left=window_left, **options)[0]
        assert error(mine_b, theirs) < TOLERANCE


@pytest.mark.parametrize("form", ["none", "padding", "per query", "per head", "per head and key"])
@pytest.mark.parametrize("size", SIZES)
def test_whole(size: tuple[int, ...], form: str) -> None:
    query, key, value, options = operands(size)
    heads, q_len, kv_len = query.shape[1], query.shape[2], key.shape[2]
    masks = {
        "none": None,
        "padding": left_padding(kv_len),
        "per query": torch.rand(2, 1, q_len, kv_len, device=DEVICE) > 0.5,
        "per head": torch.randn(1, heads, q_len, kv_len, device=DEVICE),
        "per head and key": torch.randn(2, heads, 1, kv_len, device=DEVICE),
    }
    mine = slices.prefill_whole(query, key, value, masks[form], **options)
    assert error(mine, reference.prefill(query, key, value, masks[form], **options)[0]) < TOLERANCE


@pytest.mark.parametrize("window_left", [-1, 6])
@pytest.mark.parametrize(
    ("new", "past"),
    [
        ([33, 0, 16, 40], [12, 29, 0, 26]),
        ([17, 5, 1, 16], [4, 24, 3, 0]),
        ([1, 1, 2], [23, 2, 9]),
        ([0, 48, 0], [3, 20, 0]),
        ([40], [0]),
    ],
)
def test_paged(new: list[int], past: list[int], window_left: int) -> None:
    block_size, rows_of_none = 4, 3
    lens = torch.tensor(new) + torch.tensor(past)
    per_sequence = -(-int(lens.max()) // block_size)
    num_blocks = len(new) * per_sequence + 1
    tables = torch.randperm(num_blocks)[:-1].view(len(new), -1).to(DEVICE, torch.int32)
    key_cache = torch.randn(num_blocks, block_size, 2, 192, device=DEVICE)
    value_cache = torch.randn(num_blocks, block_size, 2, 136, device=DEVICE)
    query = torch.randn(sum(new) + rows_of_none, 4, 192, device=DEVICE)
    seq_lens = lens.to(DEVICE, torch.int32)
    bounds = torch.tensor([0, *new]).cumsum(0).to(DEVICE, torch.int32)
    where = key_cache, value_cache, tables, seq_lens, bounds
    mine = slices.paged_prefill(query, *where, window_left=window_left, **OPTIONS)
    theirs = reference.paged_prefill(query, *where, max(new), window_left=window_left, **OPTIONS)[0]
    assert mine.shape == theirs.shape
    assert error(mine[: sum(new)], theirs[: sum(new)]) < TOLERANCE


def test_limits() -> None:
    """The two numbers in Python are those of the planner."""

    def tensor(rows: int, dim: int) -> Tensor:
        return torch.empty(1, 1, rows, dim, device="meta")

    narrow, wide = (tensor(32, MAX_PREFILL_HEAD_DIM + more) for more in (0, 8))
    assert not slices.needs_slices(narrow, narrow) and torch_fattn.explain("prefill", narrow, narrow, narrow)
    for key, value in ((wide, narrow), (narrow, wide)):
        assert slices.needs_slices(key, value)
        with pytest.raises(NotImplementedError, match=f"above {MAX_PREFILL_HEAD_DIM}"):
            torch_fattn.explain("prefill", key, key, value)
    most, more = (tensor(rows, 16) for rows in (MAX_DECODE_ROWS, MAX_DECODE_ROWS + 1))
    assert torch_fattn.explain("decode", most, most, most)
    with pytest.raises(NotImplementedError, match=f"above {MAX_DECODE_ROWS}"):
        torch_fattn.explain("decode", more, more, more)
