"""torch_fattn.patterns against definitions that look at each token."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from tests.conftest import counted_launches
from torch_fattn import patterns, reference

BLOCKS, MPS = (32, 64), torch.device("mps")


def rows(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to("mps", dtype)


def blocks_of(length: int, size: int) -> list[slice]:
    return [slice(first, min(first + size, length)) for first in range(0, length, size)]


def means(x: Tensor, size: int) -> Tensor:
    x = x.cpu().double()
    return torch.stack([x[..., block, :].mean(-2) for block in blocks_of(x.shape[-2], size)], -2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_of_pooled_rows(dtype: torch.dtype) -> None:
    query, key = rows(2, 4, 150, 16, dtype=dtype), rows(2, 2, 201, 16, dtype=dtype)
    for scale in (None, 0.7):
        scores = patterns.pooled_scores(query, key, BLOCKS, scale)
        shared = means(key, 64).repeat_interleave(2, 1)
        exact = torch.softmax(means(query, 32) @ shared.mT * (scale or 16**-0.5), -1)
        assert scores.shape == (2, 4, 5, 4) and scores.dtype == torch.float32
        assert torch.allclose(scores.cpu().double(), exact, atol=1e-6)


@pytest.mark.parametrize("density", [0.01, 0.3, 0.5, 1.0])
def test_top_blocks(density: float) -> None:
    scores = torch.softmax(rows(2, 3, 7, 10), -1)
    kept = patterns.top_blocks(scores, density)
    count = max(1, round(10 * density))
    lowest = scores.cpu().sort(-1, descending=True).values[..., count - 1, None]
    assert kept.dtype == torch.bool and torch.equal(kept.cpu(), scores.cpu() >= lowest)


@pytest.mark.parametrize(("mass", "least"), [(0.5, 0.1), (0.9, 0.1), (0.3, 0.6), (1.0, 0.1)])
def test_mass_blocks(mass: float, least: float) -> None:
    scores = torch.softmax(3 * rows(2, 3, 7, 10), -1)
    kept = patterns.mass_blocks(scores, mass, least).cpu().flatten(0, 2)
    for own, marks in zip(scores.cpu().flatten(0, 2), kept, strict=True):
        ranked, count = own.sort(descending=True), int(marks.sum())
        assert marks[ranked.indices[:count]].all()
        assert ranked.values[:count].sum() > mass - 1e-5 and count >= math.ceil(10 * least)
        assert count == math.ceil(10 * least) or ranked.values[: count - 1].sum() < mass + 1e-5


GRIDS = [((7,), (3,)), ((5, 6), (2, 4)), ((3, 9, 7), (2, 4, 4)), ((4, 8, 8), (4, 4, 4))]


@pytest.mark.parametrize(("grid", "tile"), GRIDS)
def test_tile_order(grid: tuple[int, ...], tile: tuple[int, ...]) -> None:
    order = patterns.tile_order(grid, tile, MPS).cpu()
    places = list(itertools.product(*map(range, grid)))
    by_tile = sorted(
        range(len(places)),
        key=lambda i: (
            [x // t for x, t in zip(places[i], tile, strict=True)]
            + [x % t for x, t in zip(places[i], tile, strict=True)]
        ),
    )
    assert order.tolist() == by_tile
    assert torch.equal(order[order.argsort()], torch.arange(len(places))), "the inverse"


@pytest.mark.parametrize("first", [0, 5, 37])
@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize(("grid", "window"), [((90,), (7,)), ((9, 11), (0, 3)), ((3, 7, 9), (1, 2, 20))])
def test_neighborhood(grid: tuple[int, ...], window: tuple[int, ...], tiled: bool, first: int) -> None:
    order = patterns.tile_order(grid, (2,) * len(grid), MPS) if tiled else None
    mask = patterns.neighborhood(grid, window, (16, 32), order, first, device=MPS)
    places = torch.tensor(list(itertools.product(*map(range, grid))))
    places = places if order is None else places[order.cpu()]
    near = ((places[:, None] - places).abs() <= torch.tensor(window)).all(-1)
    length = first + len(near)
    visible = torch.ones(length, length, dtype=torch.bool)
    visible[first:, first:] = near
    exact = [[bool(visible[r, k].any()) for k in blocks_of(length, 32)] for r in blocks_of(length, 16)]
    assert mask.dtype == torch.bool and mask[0, 0].tolist() == exact
    assert not all(map(all, exact)) or first > 32, "the control: some blocks are hidden"


@pytest.mark.parametrize("order", [torch.zeros(6, dtype=torch.long), torch.arange(6.0), torch.arange(5)])
def test_an_order_is_a_permutation(order: Tensor) -> None:
    with pytest.raises(ValueError, match="order is .* not a permutation of 6 tokens; pass tile_order"):
        patterns.neighborhood((2, 3), (1, 1), order=order)
    patterns.neighborhood((2, 3), (1, 1), order=patterns.tile_order((2, 3), (1, 2), "cpu"))


def test_blocks_of_a_block_mask() -> None:
    kept = torch.rand(2, 3, 4, 5) < 0.5
    listed = kept.int().argsort(-1, descending=True).int()
    counts, none = kept.sum(-1).int(), torch.zeros(2, 3, 4, dtype=torch.int32)
    lists = (none, listed, counts, listed)
    full = BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=(64, 32), seq_lengths=(250, 150))
    mask, size = patterns.of_block_mask(full)
    assert size == (64, 32) and torch.equal(mask, kept)
    causal = create_block_mask(lambda b, h, q, k: q >= k, None, None, 96, 96, "cpu", BLOCK_SIZE=32)
    with pytest.raises(
        ValueError, match="has partial blocks.*; pass it to torch_fattn.integrations.flex_att"
    ):
        patterns.of_block_mask(causal)


def with_means(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **options: Any) -> Tensor:
    """Softmax over the keys of visible blocks and the means of hidden ones, weighed by their sizes."""
    query, key, value = (x.cpu().double() for x in (query, key, value))
    share = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(share, 1) for x in (key, value))
    sizes = torch.tensor([float(block.stop - block.start) for block in blocks_of(key.shape[2], BLOCKS[1])])
    both_keys, both_values = (torch.cat([x, means(x, BLOCKS[1])], 2) for x in (key, value))
    mask = mask.cpu().bool().expand(*query.shape[:2], -1, -1).repeat_interleave(BLOCKS[0], 2)
    mask = mask[:, :, : query.shape[2]]
    by_key = mask.repeat_interleave(BLOCKS[1], 3)[..., : key.shape[2]]
    bias = torch.cat([torch.zeros(key.shape[2]), sizes.log()]).double()
    scores = query @ both_keys.mT * options.get("scale", query.shape[-1] ** -0.5) + bias
    return torch.softmax(scores.masked_fill(~torch.cat([by_key, ~mask], 3), -torch.inf), -1) @ both_values


@pytest.mark.parametrize(
    ("batch", "q_len", "kv_len", "mask_shape"),
    [(1, 96, 128, (1, 1)), (2, 75, 150, (2, 4)), (2, 75, 150, (2, 1)), (2, 33, 40, (1, 4))],
)
def test_hidden_blocks_take_part_as_their_means(
    batch: int, q_len: int, kv_len: int, mask_shape: tuple[int, int]
) -> None:
    query, key, value = rows(batch, 4, q_len, 16), rows(batch, 2, kv_len, 16), rows(batch, 2, kv_len, 24)
    size = (*mask_shape, len(blocks_of(q_len, BLOCKS[0])), len(blocks_of(kv_len, BLOCKS[1])))
    mask = torch.rand(size) < 0.5
    mask[..., 0, :] = False  # only means
    mask[..., -1, :] = True  # no means
    for given, options in ((mask, {}), (mask.to(torch.uint8) * 3, {"scale": 0.5})):
        with counted_launches() as launches:
            out = patterns.attention_with_means(
                query, key, value, given.to("mps"), block_size=BLOCKS, **options
            )
        assert launches["fattn_prefill"] == 2 and launches["fattn_merge"] == 1
        exact = with_means(query, key, value, mask, **options)
        assert out.shape == exact.shape and torch.allclose(out.cpu().double(), exact, atol=2e-6)
    hidden = reference.prefill(query, key, value, block_mask=mask, block_size=BLOCKS)[0]
    assert not torch.allclose(hidden, exact, atol=1e-3), "the control: means change the result"


def test_a_pattern() -> None:
    x, fewer, shared = rows(2, 4, 100, 20), rows(2, 4, 99, 20), rows(2, 2, 100, 20).requires_grad_()
    pattern = patterns.Pattern(0.5, (32, 32), min_tokens=100)
    assert pattern.attention(x, fewer, fewer) is None and pattern.attention(fewer, fewer, fewer) is None
    assert patterns.Pattern(lambda query, key: None, min_tokens=1).attention(x, x, x) is None
    out = pattern.attention(x, shared, shared)  # padded, and with a gradient
    assert out is not None and out.transpose(1, 2).is_contiguous()
    padded = [torch.nn.functional.pad(each.detach(), (0, 4)) for each in (x, shared, shared)]
    mask = patterns.top_blocks(patterns.pooled_scores(x, shared, (32, 32)), 0.5)
    exact, _ = reference.prefill(*padded, block_mask=mask.cpu(), block_size=(32, 32), scale=20**-0.5)
    assert torch.allclose(out.cpu().double(), exact[..., :20], atol=2e-6)
    out.sum().backward()
    assert shared.grad is not None and shared.grad.abs().sum() > 0
