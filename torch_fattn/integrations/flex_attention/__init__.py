"""`torch.nn.attention.flex_attention.flex_attention` on torch_fattn's kernels:

    from torch_fattn.integrations.flex_attention import flex_attention

A trace maps `score_mod` to the operators' options and an `attn_mask`. A `BlockMask` becomes options (causal,
a window, a prefix) or a mask with its map.
"""

from __future__ import annotations

from .attention import flex_attention, mask_of

__all__ = ["flex_attention", "mask_of"]
