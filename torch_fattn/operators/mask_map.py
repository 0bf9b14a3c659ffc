"""`mask_map` as a Python function, documented. All work is in `torch.ops.fattn`."""

from __future__ import annotations

import torch
from torch import Tensor

from ..runtime.signatures import public
from .block_mask import BlockMask, mask_of

__all__ = ["mask_map"]


@public("fattn.mask_map")
def mask_map(attn_mask: Tensor | BlockMask) -> Tensor:
    """Classifies a mask by cells of 16 query rows and 32 keys, so that `prefill` can skip whole cells. Use it
    for packed documents, prefixes and block-sparse patterns.

        cells = torch_fattn.mask_map(mask)
        for layer in layers:
            ... torch_fattn.prefill(query, key, value, mask, mask_map=cells)

    `prefill` makes a map itself if that is cheap relative to the call. Pass one to reuse it.

    Args:
        attn_mask: as in `prefill`, up to four dimensions `[B, Hq, Lq, Lk]`: bool, float32, float16 or
            bfloat16, any strides. Expanded dimensions are read once. Or a `BlockMask` of
            `torch.nn.attention.flex_attention`: the map of its mask from
            `torch_fattn.integrations.flex_attention.mask_of`.

    Returns:
        uint8 `[B, Hq, ceil(Lq / 16), ceil(Lk / 32)]`, with size 1 where the mask has size 1 or is expanded.
        0: every entry is False or -inf. 2: every entry is True or 0. Otherwise: 1, plus `4 << f` for each
        fragment f of 8 keys in the cell that no row sees. 1 is always valid. Make a new map when the mask
        changes.

    Raises:
        TypeError: dtypes; no tensor.
        ValueError: over four dimensions; sizes above the limits of `prefill`.
    """
    if not isinstance(attn_mask, Tensor):
        attn_mask = mask_of("fattn.mask_map", attn_mask)
    for dim, (size, stride) in enumerate(zip(attn_mask.shape, attn_mask.stride(), strict=True)):
        if stride == 0 and size > 1:
            attn_mask = attn_mask.narrow(dim, 0, 1)
    return torch.ops.fattn.mask_map(attn_mask)
