"""Attention through a block mask: the correction of hidden blocks, and patterns for models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..operators.attention import merge, prefill
from ..operators.differentiable import attention, needs_gradient
from ..operators.head_padding import pad_heads, without_padding
from ..runtime.signatures import public
from .selection import BLOCK_SIZE, check_share, pooled, pooled_scores, top_blocks


@public("torch_fattn.patterns.attention_with_means", refused_by="prefill")
def attention_with_means(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_mask: Tensor,
    *,
    block_size: tuple[int, int] = BLOCK_SIZE,
    scale: float | None = None,
) -> Tensor:
    """`torch_fattn.prefill` with a block mask, in which each hidden block takes part as its mean key with its
    mean value, weighed by its number of keys: the coarse branch of VSA, SLA and Sol-Attn. It helps heads
    whose attention is spread over many keys, at 1 / bk of the work of dense attention and a copy of the
    result. No causality, and no gradients.

    Args:
        query, key, value, scale: as in `prefill`.
        block_mask, block_size: as in `prefill`.

    Returns:
        out `[B, Hq, Lq, Dv]`.
    """
    fine = prefill(
        query, key, value, block_mask=block_mask, block_size=block_size, scale=scale, return_lse=True
    )
    batch, heads, length, _ = query.shape
    rows, keys = block_size
    tiles = -(-length // rows)
    # Each block of rows is a sequence of a batch, and the real batch is a part of the heads: the means are
    # expanded and the mask has one row per block.
    if missing := tiles * rows - length:
        query = pad(query, (0, 0, 0, missing))
    by_tile = query.unflatten(2, (tiles, rows)).permute(2, 0, 1, 3, 4).flatten(1, 2)
    means = [
        pooled(each, keys).to(query.dtype).flatten(0, 1).expand(tiles, -1, -1, -1) for each in (key, value)
    ]
    count = torch.full((means[0].shape[2],), float(keys), dtype=torch.float32, device=query.device)
    count[-1:] = key.shape[2] - keys * (len(count) - 1)
    bias = count.log().masked_fill(block_mask.bool(), -torch.inf).expand(batch, heads, -1, -1)
    bias = bias.permute(2, 0, 1, 3).flatten(1, 2)[:, :, None]
    coarse, lse = prefill(by_tile, *means, bias, scale=scale, return_lse=True)
    coarse = coarse.unflatten(1, (batch, heads)).permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :length]
    lse = lse.unflatten(1, (batch, heads)).permute(1, 2, 0, 3).flatten(2, 3)[:, :, :length]
    return merge(torch.stack([fine[0], coarse]), torch.stack([fine[1], lse]))


class Pattern:
    """What the integrations replace a model's long self-attention with.

    Args:
        select: the density for `top_blocks(pooled_scores(query, key), density)`; or a function
            `select(query, key)` that returns the block mask of a layer's `[B, H, L, D]`, or None to keep the
            attention exact.
        block_size: rows of query and of key in a block.
        min_tokens: shorter calls stay exact.
        with_means: let hidden blocks take part as their means, with `attention_with_means`.
    """

    @public("Pattern")
    def __init__(
        self,
        select: float | Callable[[Tensor, Tensor], Tensor | None],
        block_size: tuple[int, int] = BLOCK_SIZE,
        min_tokens: int = 16384,
        with_means: bool = False,
    ) -> None:
        row = torch.empty(1, 1, 1, 8, dtype=torch.float32, device="meta")
        prefill(row, row, row, block_size=block_size)  # checks it
        if isinstance(select, type):
            raise TypeError(f"Pattern: select is the class {select.__name__}; pass a density or a function")
        if not callable(select):
            check_share("Pattern", "select", select)
        self.select, self.block_size = select, block_size
        self.min_tokens, self.with_means = min_tokens, with_means

    @public("Pattern.attention", refused_by="prefill")
    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None = None
    ) -> Tensor | None:
        """The result of a call without a mask; None where it shall stay exact. Without means it is a
        transposed view of `[B, L, H, Dv]` in memory."""
        batch, heads, length, _ = query.shape
        is_self = (batch, length) == (key.shape[0], key.shape[2]) and key.shape[:3] == value.shape[:3]
        if not is_self or length < self.min_tokens or key.shape[1] == 0 or heads % key.shape[1]:
            return None
        if callable(self.select):
            block_mask = self.select(query, key)
        else:
            block_mask = top_blocks(pooled_scores(query, key, self.block_size), self.select)
        if block_mask is None:
            return None
        value_dim = value.shape[-1]
        query, key, value, scale = pad_heads(query, key, value, scale)
        blocks: dict[str, Any] = {"block_mask": block_mask, "block_size": self.block_size, "scale": scale}
        if self.with_means:
            out = attention_with_means(query, key, value, **blocks)
        else:
            op = attention if needs_gradient(query, key, value) else prefill
            out = op(query, key, value, token_major_out=True, **blocks)
        return without_padding(out.transpose(1, 2), value_dim).transpose(1, 2)
