"""Blocks chosen by the scores of pooled rows."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..operators.block_mask import BlockMask, blocks_of
from ..runtime.signatures import public
from ..runtime.tensor_checks import check_device

BLOCK_SIZE = (128, 128)  # the default of `block_size` in the operators


def pooled(x: Tensor, block: int) -> Tensor:
    """The mean of each block of rows of `[.., L, D]`, float32 `[.., ceil(L / block), D]`. The last block may
    be shorter."""
    length = x.shape[-2]
    whole = length - length % block
    means = x[..., :whole, :].unflatten(-2, (whole // block, block)).mean(-2, dtype=torch.float32)
    if whole < length:
        means = torch.cat([means, x[..., whole:, :].mean(-2, keepdim=True, dtype=torch.float32)], -2)
    return means


@public("torch_fattn.patterns.pooled_scores")
def pooled_scores(
    query: Tensor, key: Tensor, block_size: tuple[int, int] = BLOCK_SIZE, scale: float | None = None
) -> Tensor:
    """Attention between the means of blocks, by which `top_blocks` and `mass_blocks` choose: the rule of
    SpargeAttn, MoBA and VSA.

    Args:
        query, key: `[B, Hq, Lq, D]` and `[B, Hkv, Lk, D]`.
        block_size: rows of query and of key in a block.
        scale: of the scores; default D^-0.5.

    Returns:
        float32 `[B, Hq, ceil(Lq / bq), ceil(Lk / bk)]`, each row the softmax over the blocks of keys.
    """
    name = "torch_fattn.patterns.pooled_scores"
    check_block_size(name, block_size)
    is_rank_4 = query.dim() == key.dim() == 4 and key.shape[1] > 0 and key.shape[3] > 0
    if not is_rank_4 or query.shape[::3] != key.shape[::3] or query.shape[1] % key.shape[1]:
        raise ValueError(
            f"{name}: query has shape {list(query.shape)} and key {list(key.shape)}; pass [B, Hq, Lq, D] and "
            "[B, Hkv, Lk, D], where Hq is a multiple of Hkv"
        )
    check_device(name, "key", key, query)
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    rows, keys = pooled(query, block_size[0]), pooled(key, block_size[1])
    keys = keys.repeat_interleave(query.shape[1] // key.shape[1], 1)
    return torch.softmax(rows @ keys.mT * scale, -1)


@public("torch_fattn.patterns.top_blocks")
def top_blocks(scores: Tensor, density: float) -> Tensor:
    """The blocks with the highest scores, the same number in each row of blocks, so that a call's time is
    known.

    Args:
        scores: `[.., n]`, as of `pooled_scores`.
        density: the share of blocks that stays visible, above 0 and at most 1; at least one block does.
    """
    _check_scores("torch_fattn.patterns.top_blocks", scores)
    check_share("torch_fattn.patterns.top_blocks", "density", density)
    count = max(1, round(float(density) * scores.shape[-1]))
    return _marked(scores.topk(min(count, scores.shape[-1]), -1).indices, scores)


@public("torch_fattn.patterns.mass_blocks")
def mass_blocks(scores: Tensor, mass: float, least: float = 0.1) -> Tensor:
    """The fewest blocks of each row whose scores reach a sum. The mass of pooled scores is not that of the
    keys: where the rows of a block differ, few blocks reach it, and `least` bounds the error.

    Args:
        scores: `[.., n]`, as of `pooled_scores`: rows with the sum 1.
        mass: the sum, above 0 and at most 1.
        least: the smallest share of blocks that stays visible, above 0 and at most 1.
    """
    _check_scores("torch_fattn.patterns.mass_blocks", scores)
    check_share("torch_fattn.patterns.mass_blocks", "mass", mass)
    check_share("torch_fattn.patterns.mass_blocks", "least", least)
    ranked, indices = scores.sort(-1, descending=True)
    is_needed = ranked.cumsum(-1) - ranked < float(mass)
    is_needed[..., : max(1, math.ceil(float(least) * scores.shape[-1]))] = True
    return _marked(indices, scores, is_needed)


@public("torch_fattn.patterns.of_block_mask")
def of_block_mask(block_mask: BlockMask) -> tuple[Tensor, tuple[int, int]]:
    """The `block_mask` and `block_size` of a FlexAttention `BlockMask` without partial blocks. It waits for
    the device to check that."""
    name = "torch_fattn.patterns.of_block_mask"
    found = blocks_of(name, block_mask)
    if found is None:
        raise ValueError(
            f"{name}: block_mask has partial blocks, or blocks that are not multiples of 32; pass it to "
            "torch_fattn.integrations.flex_attention.flex_attention"
        )
    return found


def _marked(indices: Tensor, scores: Tensor, marks: Tensor | None = None) -> Tensor:
    marks = torch.ones_like(indices, dtype=torch.bool) if marks is None else marks
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, indices, marks)


def _check_scores(name: str, scores: Tensor) -> None:
    if not scores.is_floating_point():
        raise TypeError(f"{name}: scores is {scores.dtype}; convert it with .float()")
    if scores.dim() == 0:
        raise ValueError(f"{name}: scores has shape []; pass [.., blocks], as of pooled_scores")


def check_share(name: str, what: str, share: float) -> None:
    if not 0 < share <= 1:
        raise ValueError(f"{name}: {what} is {share}; pass a number above 0 and at most 1")


def check_block_size(name: str, block_size: tuple[int, int]) -> None:
    if min(block_size) < 1:
        raise ValueError(f"{name}: block_size is {tuple(block_size)}; pass two positive sizes")
