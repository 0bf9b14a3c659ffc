"""`torch.nn.attention.flex_attention.flex_attention` on torch_fattn's kernels:

    from torch_fattn.integrations.flex_attention import flex_attention

A `score_mod` that does what options of the operators do is recognised by its values; others are refused. A
`BlockMask` becomes options (causal, a window, a prefix) or a mask with its map, once for all calls with it.
"""

from __future__ import annotations

from .attention import flex_attention, mask_of

__all__ = ["flex_attention", "mask_of"]
