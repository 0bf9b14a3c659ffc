"""`flex_attention`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from ...operators import block_mask as block_masks
from ...operators.attention import prefill
from ...operators.differentiable import attention, needs_gradient
from ...operators.head_padding import pad_heads, without_padding
from ...operators.mask_map import mask_map
from ...runtime.signatures import public
from .positions import Places, options_of_mask, visible
from .score_mods import NAME, options_of


class _Prepared(NamedTuple):
    """What the calls with a BlockMask need."""

    made_of: tuple[Any, ...]  # of these parts, which its owner may replace
    mask: Tensor | None  # None: the options say it all
    options: dict[str, Any]


_prepared: WeakKeyDictionary[BlockMask, _Prepared] = WeakKeyDictionary()


@public("torch_fattn.integrations.flex_attention.mask_of")
def mask_of(block_mask: BlockMask) -> Tensor:
    """The bool mask `[B, H, Lq, Lk]` of a BlockMask, True = attend, for `torch_fattn.prefill` with
    `mask_map=torch_fattn.mask_map(block_mask)`. B and H are those of the BlockMask, and may be 1. As in
    FlexAttention's kernels, `mask_mod` is evaluated only in blocks that are listed and not full.

    Raises ValueError for a slice whose seq_lengths were not set, and for lists of blocks that do not fit.
    """
    return block_masks.mask_of("torch_fattn.integrations.flex_attention.mask_of", block_mask)


@public(NAME)
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor] | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """`torch.nn.attention.flex_attention.flex_attention` on the kernels of `torch_fattn.prefill`, with
    gradients of query, key and value.

    Args:
        query: `[B, Hq, Lq, D]`, float32, float16 or bfloat16. D is up to 576, or 256 where gradients are
            needed.
        key, value: `[B or 1, Hkv, Lk, D]` and `[B or 1, Hkv, Lk, Dv]`. `Hkv != Hq` needs enable_gqa.
        score_mod: `score_mod(score, b, h, q_idx, kv_idx)`. It may apply a soft cap, then add ALiBi,
            `slope * (kv_idx - q_idx)`; and return -inf for keys that are not causal, outside a window, or
            both unless they are in a prefix. Every call recognises it by its values at some thousand places,
            which costs two waits for the device. What it does elsewhere goes unnoticed, unless FATTN_CHECK=1
            is in the environment.
        block_mask: of `[B or 1, Hq or 1, Lq, Lk]`. The first call makes its mask and map, which live as long
            as it does; a mask that is causal, a window or a prefix becomes options instead.
        return_lse: also return the natural logarithm of each row's softmax denominator, float32
            `[B, Hq, Lq]`.

    Returns:
        out `[B, Hq, Lq, Dv]`. A row that sees no key is 0, with lse -inf.

    Raises:
        NotImplementedError: a score_mod that the operators have no option for; the message names what to use.
        TypeError: dtypes.
        ValueError: shapes, devices.

    The interface is FlexAttention's (Dong et al. 2024).
    """
    for what, operand in (("query", query), ("key", key), ("value", value)):
        if operand.dim() != 4:
            raise ValueError(
                f"{NAME}: {what} has {operand.dim()} dimensions; its shape must be [batch, heads, length, "
                "head_dim]"
            )
    if query.shape[1] != key.shape[1] and not enable_gqa:
        raise ValueError(
            f"{NAME}: {query.shape[1]} query heads and {key.shape[1]} key-value heads differ; pass "
            "enable_gqa=True"
        )
    batch, heads, rows, _dim = query.shape
    if key.shape[0] == value.shape[0] == 1:
        key, value = (operand.expand(batch, -1, -1, -1) for operand in (key, value))
    keys = key.shape[2]
    options: dict[str, Any] = {"q_offset": 0}
    mask = sees = None
    if block_mask is not None:
        mask, found, sees = _of_block_mask(block_mask, (batch, heads, rows, keys), query.device)
        options |= found
    if score_mod is not None:
        options |= options_of(score_mod, (batch, heads, rows, keys), sees, query.device)
    value_dim = value.shape[-1]
    query, key, value, options["scale"] = pad_heads(query, key, value, scale)
    op = attention if needs_gradient(query, key, value) else prefill
    out, lse = op(query, key, value, mask, return_lse=True, **options)
    out = without_padding(out, value_dim)
    return (out, lse) if return_lse else out


def _of_block_mask(
    block_mask: BlockMask, shape: tuple[int, int, int, int], device: torch.device
) -> tuple[Tensor | None, dict[str, Any], Callable[..., Tensor]]:
    """The mask of a call, its options, and what is visible at given places."""
    batch, heads, rows, keys = shape
    of_batch, of_heads = block_mask.kv_num_blocks.shape[:2]
    if of_batch not in (1, batch) or of_heads not in (1, heads) or block_mask.seq_lengths != (rows, keys):
        raise ValueError(
            f"{NAME}: block_mask is for {[of_batch, of_heads, *block_mask.seq_lengths]} and the call for "
            f"{list(shape)}; make it with create_block_mask(mask_mod, None, None, {rows}, {keys})"
        )
    if block_mask.kv_num_blocks.device != device:
        raise ValueError(
            f"{NAME}: block_mask is on {block_mask.kv_num_blocks.device} and query on {device}; move it with "
            f'.to("{device}")'
        )
    made_of = (block_mask.mask_mod, block_mask.kv_indices, block_mask.full_kv_indices)
    prepared = _prepared.get(block_mask)
    if prepared is None or any(a is not b for a, b in zip(prepared.made_of, made_of, strict=True)):
        mask: Tensor | None = block_masks.mask_of(NAME, block_mask)
        assert mask is not None
        options = options_of_mask(mask)
        if options is None:
            options = {"mask_map": mask_map(mask)}
        else:
            mask = None
        prepared = _prepared[block_mask] = _Prepared(made_of, mask, options)

    def sees(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        if prepared.mask is None:
            return visible(Places(q_idx, kv_idx), prepared.options)
        of_batch, of_heads = prepared.mask.shape[:2]
        return prepared.mask[b % of_batch, h % of_heads, q_idx, kv_idx]

    return prepared.mask, prepared.options, sees
