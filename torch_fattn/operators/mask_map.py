"""`mask_map` as a Python function, documented. All work is in `torch.ops.fattn`."""

from __future__ import annotations

import torch
from torch import Tensor

from ..runtime.signatures import public

__all__ = ["mask_map"]


@public("fattn.mask_map")
def mask_map(attn_mask: Tensor) -> Tensor:
    """What a mask hides and what it leaves as it is, cell by cell of 16 query rows and 32 keys, so that
    `prefill` can leave out whole cells: of packed documents, of a prefix, of a block-sparse pattern.

        cells = torch_fattn.mask_map(mask)
        for layer in layers:
            ... torch_fattn.prefill(query, key, value, mask, mask_map=cells)

    `prefill` makes a map itself where that is small beside the call. Give it one that is used again, by
    the next layer or the next call: it is then made once.

    Args:
        attn_mask: as `prefill` takes it, of up to four dimensions `[B, Hq, Lq, Lk]`: bool, float32, float16
            or bfloat16, of any strides. A dimension in which it is expanded is read once.

    Returns:
        uint8 `[B, Hq, ceil(Lq / 16), ceil(Lk / 32)]`, with 1 for each dimension in which the mask has 1 or is
        expanded. 0: no row of the cell sees a key, every entry is False or -inf. 2: every row sees every key
        and nothing is added, every entry is True or 0. Anything else: 1, and `4 << f` more for each of the
        cell's fragments f of 8 keys of which no row sees a key. A 1 may stand in the place of any of them. It
        is to be made anew when the mask changes.

    Raises:
        TypeError: dtypes; no tensor.
        ValueError: over four dimensions; sizes above the limits of `prefill`.
    """
    for dim, (size, stride) in enumerate(zip(attn_mask.shape, attn_mask.stride(), strict=True)):
        if stride == 0 and size > 1:
            attn_mask = attn_mask.narrow(dim, 0, 1)
    return torch.ops.fattn.mask_map(attn_mask)
