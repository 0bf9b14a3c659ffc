"""FlexAttention's `BlockMask` as the masks of the operators."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..runtime.signatures import is_checked

__all__ = ["BlockMask", "blocks_of", "mask_of"]

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask
else:

    class _BlockMaskType(type):
        """From torch 2.15 on, importing that module takes 0.4 s. Until it is imported, nothing is a
        BlockMask."""

        def __instancecheck__(cls, value: object) -> bool:
            module = sys.modules.get("torch.nn.attention.flex_attention")
            return module is not None and isinstance(value, module.BlockMask)

    class BlockMask(metaclass=_BlockMaskType):
        pass


_ELEMENTS_AT_A_TIME = 2**24
_LEAST, _MOST = 32, 256  # rows or keys of a block of `prefill`


def mask_of(
    name: str, block_mask: BlockMask, shape: tuple[int, int] = (1, 1), places: Tensor | None = None
) -> Tensor:
    """bool `[B, H, Lq, Lk]`, True = attend. As in FlexAttention's kernels, a full block is visible, an
    unlisted one is not, and `mask_mod` is evaluated in the others. `shape`: B and H, where the BlockMask has
    1. `places`: from `places_of`."""
    if places is None:
        places = places_of(name, block_mask, shape)
    rows, keys = block_mask.seq_lengths
    partial, full = _blocks_of(block_mask, shape)
    block_rows, block_keys = (min(*sizes) for sizes in zip(block_mask.BLOCK_SIZE, (rows, keys), strict=True))
    mask = full.repeat_interleave(block_rows, 2)[:, :, :rows].repeat_interleave(block_keys, 3)[..., :keys]
    mask = mask.contiguous()
    row, key = (torch.arange(n, device=mask.device) for n in (block_rows, block_keys))
    at_a_time = max(1, _ELEMENTS_AT_A_TIME // max(1, block_rows * block_keys))
    for blocks in places.split(at_a_time) if len(places) else ():
        at = batch, head, block_row, block_key = blocks.unbind(1)
        # Past the end, repeat the last row and key.
        q_idx = (block_row[:, None] * block_rows + row).clamp(max=rows - 1)
        kv_idx = (block_key[:, None] * block_keys + key).clamp(max=keys - 1)
        seen = _evaluate(block_mask, batch, head, q_idx, kv_idx)
        seen = torch.where(partial[at][:, None, None], seen, full[at][:, None, None])
        mask[batch[:, None, None], head[:, None, None], q_idx[:, :, None], kv_idx[:, None]] = seen
    return mask


def places_of(name: str, block_mask: BlockMask, shape: tuple[int, int], waits: bool = True) -> Tensor:
    """int64 `[n, 4]`, the blocks in which to evaluate `mask_mod`. Without `waits` their number is unknown, so
    n is the number of all blocks, and the first one replaces the others."""
    _check(name, block_mask)
    partial, _ = _blocks_of(block_mask, shape)
    if waits or partial.numel() == 0:
        return partial.nonzero()
    every = torch.cartesian_prod(*(torch.arange(n, device=partial.device) for n in partial.shape))
    decides = partial.flatten()
    return torch.where(decides[:, None], every, every.index_select(0, decides.int().argmax()[None]))


def blocks_of(
    name: str, block_mask: BlockMask, is_whole: bool | None = None
) -> tuple[Tensor, tuple[int, int]] | None:
    """The visible blocks as `block_mask` and `block_size` of `prefill`; None if `mask_mod` is evaluated in
    some block, or the kernels have no such blocks. `is_whole`: whether it is evaluated in none; by default
    this waits for the device, unless `mask_mod` is torch's own that hides nothing."""
    from torch.nn.attention.flex_attention import noop_mask

    _check(name, block_mask)
    partial, visible = _blocks_of(block_mask, (1, 1))
    if block_mask.mask_mod is noop_mask:
        visible = partial | visible
    elif bool(partial.any()) if is_whole is None else not is_whole:
        return None
    rows, keys = (min(size & -size, _MOST) for size in block_mask.BLOCK_SIZE)
    if min(rows, keys) < _LEAST:
        return None
    for dim, unit in ((2, rows), (3, keys)):
        count = -(-block_mask.seq_lengths[dim - 2] // unit)
        of_each = min(block_mask.BLOCK_SIZE[dim - 2] // unit, count)
        visible = visible.repeat_interleave(of_each, dim).narrow(dim, 0, count)
    return visible, (rows, keys)


def _blocks_of(block_mask: BlockMask, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """bool `[B, H, rows, columns]`: the blocks in which to evaluate `mask_mod`, and the full blocks."""
    columns = -(-block_mask.seq_lengths[1] // block_mask.BLOCK_SIZE[1])
    partial, *rest = (_listed(counts, indices, columns) for _, counts, indices in _lists_of(block_mask))
    full = rest[0] if rest else torch.zeros_like(partial)
    of_shape = torch.broadcast_shapes(partial.shape, full.shape, (*shape, 1, 1))
    return (partial & ~full).expand(of_shape), full.expand(of_shape)


def _evaluate(block_mask: BlockMask, batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """`mask_mod` in n blocks: batch and head `[n]`, q_idx `[n, rows]`, kv_idx `[n, keys]`."""
    from torch.nn.attention.flex_attention import create_mask

    seen = create_mask(
        lambda n, _, i, j: block_mask.mask_mod(batch[n], head[n], q_idx[n, i], kv_idx[n, j]),
        len(batch),
        1,
        q_idx.shape[1],
        kv_idx.shape[1],
        device=q_idx.device.type,
    )
    return seen[:, 0].bool()


def _check(name: str, block_mask: BlockMask) -> None:
    rows, size, length = (
        block_mask.kv_num_blocks.shape[-1],
        block_mask.BLOCK_SIZE[0],
        block_mask.seq_lengths[0],
    )
    # torch's mask_mod of a slice only raises.
    if rows != -(-length // size) or getattr(block_mask.mask_mod, "__name__", "") == "_sliced_mask_mod_error":
        raise ValueError(
            f"{name}: block_mask has {rows} rows of blocks of {size}, and its length is {length}; set "
            "seq_lengths, and in a slice also mask_mod, to those of its rows"
        )
    columns = -(-block_mask.seq_lengths[1] // block_mask.BLOCK_SIZE[1])
    for what, counts, indices in _lists_of(block_mask):
        if is_checked(indices):
            numbers = indices[_is_listed(counts, indices)].tolist()
            if wrong := [number for number in numbers if not 0 <= number < columns]:
                raise ValueError(
                    f"{name}: {what} of block_mask has {wrong[0]} and must be between 0 and {columns - 1}"
                )


def _lists_of(block_mask: BlockMask) -> Iterator[tuple[str, Tensor, Tensor]]:
    yield "kv_indices", block_mask.kv_num_blocks, block_mask.kv_indices
    if block_mask.full_kv_num_blocks is not None and block_mask.full_kv_indices is not None:
        yield "full_kv_indices", block_mask.full_kv_num_blocks, block_mask.full_kv_indices


def _is_listed(counts: Tensor, indices: Tensor) -> Tensor:
    """Whether an element of `indices` is one of the first `counts` of its row."""
    return torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]


def _listed(counts: Tensor, indices: Tensor, columns: int) -> Tensor:
    """bool `[B, H, rows, columns]`: the listed blocks. Blocks out of range are ignored."""
    listed = _is_listed(counts, indices)
    at = torch.where(listed & (indices >= 0), indices, columns).clamp(max=columns).long()
    out = torch.zeros((*counts.shape, columns + 1), dtype=torch.bool, device=indices.device)
    return out.scatter_(-1, at, listed)[..., :columns]
