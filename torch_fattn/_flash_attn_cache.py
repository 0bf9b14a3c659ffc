"""What flash_attn_with_kvcache does to keys before it attends: rotary embedding, the append, and keys that
begin behind a padding. A dense cache is one whose sequences are a block each."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def rotate(
    x: Tensor, first: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, *, advances: bool
) -> Tensor:
    """x `[B, L, H, D]`, of which row i is at position first[b] + i, or, if the position does not advance, at
    first[b]. The first 2 * cos.shape[1] columns are rotated, in float32. A row at a position that cos and sin
    do not have is NaN."""
    steps = (
        torch.arange(x.shape[1], device=x.device) if advances else x.new_zeros(x.shape[1], dtype=torch.int64)
    )
    positions = first[:, None] + steps
    known = positions.clamp(max=cos.shape[0] - 1)
    c, s = (table[known][:, :, None].float() for table in (cos, sin))
    c = c.masked_fill((positions != known)[:, :, None, None], math.nan)
    half = cos.shape[1]
    turned, rest = x.float().split((2 * half, x.shape[-1] - 2 * half), dim=-1)
    if interleaved:
        a, b = turned[..., ::2], turned[..., 1::2]
        turned = torch.stack((a * c - b * s, a * s + b * c), dim=-1).flatten(-2)
    else:
        a, b = turned[..., :half], turned[..., half:]
        turned = torch.cat((a * c - b * s, a * s + b * c), dim=-1)
    return torch.cat((turned, rest), dim=-1).to(x.dtype)


def append(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, lens: Tensor, table: Tensor
) -> None:
    """Writes `[B, Lnew, Hkv, D]` behind the first lens[b] keys of each sequence, whose blocks the table says.
    What has no block is dropped."""
    slots = _slots(lens, key.shape[1], table, key_cache.shape[1])
    torch.ops.fattn.cache_write(
        key.flatten(0, 1), value.flatten(0, 1), key_cache, value_cache, slots.flatten()
    )


def without_padding_on_the_left(
    key_cache: Tensor, value_cache: Tensor, table: Tensor, first: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The caches in blocks of one key, and a table of those from first[b] on. A cache whose blocks do not lie
    one behind the other is copied."""
    capacity = table.shape[1] * key_cache.shape[1]
    slots = _slots(first, capacity, table, key_cache.shape[1])
    keys, values = (cache.flatten(0, 1)[:, None] for cache in (key_cache, value_cache))
    return keys, values, slots.where(slots < keys.shape[0], -1).to(torch.int32)


def _slots(first: Tensor, count: int, table: Tensor, block_size: int) -> Tensor:
    """Where in the cache the keys first[b] to first[b] + count - 1 of each sequence are, `[B, count]`; -1 if
    they have no block."""
    positions = first[:, None].long() + torch.arange(count, device=table.device)
    column = torch.div(positions, block_size, rounding_mode="floor")
    block = table.long().gather(1, column.clamp(max=table.shape[1] - 1))
    slots = block * block_size + positions % block_size
    return slots.where((column < table.shape[1]) & (block >= 0), -1)
