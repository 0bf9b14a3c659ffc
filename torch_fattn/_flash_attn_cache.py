"""What flash_attn_with_kvcache does to keys before it attends: rotary embedding, and the append."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(
    x: Tensor, first: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, *, advances: bool
) -> Tensor:
    """x `[B, L, H, D]`, of which row i is at position first[b] + i, or, if the position does not advance, at
    first[b]. The first 2 * cos.shape[1] columns are rotated, in float32."""
    steps = (
        torch.arange(x.shape[1], device=x.device) if advances else x.new_zeros(x.shape[1], dtype=torch.int64)
    )
    positions = (first[:, None] + steps).clamp(max=cos.shape[0] - 1)
    c, s = (table[positions][:, :, None].float() for table in (cos, sin))
    half = cos.shape[1]
    turned, rest = x[..., : 2 * half].float(), x[..., 2 * half :]
    if interleaved:
        a, b = turned[..., ::2], turned[..., 1::2]
        turned = torch.stack((a * c - b * s, a * s + b * c), dim=-1).flatten(-2)
    else:
        a, b = turned[..., :half], turned[..., half:]
        turned = torch.cat((a * c - b * s, a * s + b * c), dim=-1)
    return torch.cat((turned.to(x.dtype), rest), dim=-1)


def append(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, lens: Tensor, table: Tensor
) -> None:
    """Writes `[B, Lnew, Hkv, D]` behind the first lens[b] keys of each sequence, whose blocks the table says.
    What has no block is dropped."""
    block_size = key_cache.shape[1]
    positions = lens[:, None].long() + torch.arange(key.shape[1], device=key.device)
    column = torch.div(positions, block_size, rounding_mode="floor")
    block = table.long().gather(1, column.clamp(max=table.shape[1] - 1))
    slots = block * block_size + positions % block_size
    slots = slots.where((column < table.shape[1]) & (block >= 0), -1)
    torch.ops.fattn.cache_write(
        key.flatten(0, 1), value.flatten(0, 1), key_cache, value_cache, slots.flatten()
    )
