"""The names that transformers looks up in a kernel from the Hub: `flash_attn_forward` and
`supports_flash_attn`.

A package of the `kernels` library with these two names is an attention implementation under the name of its
repository, without `register()`. It receives the masks of sdpa attention. From transformers 5.23 on,
continuous batching works with it if its name contains "flash".
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ...runtime.signatures import public
from .attention import attend

__all__ = ["flash_attn_forward", "supports_flash_attn"]

supports_flash_attn = True


@public("torch_fattn.integrations.transformers.kernel.flash_attn_forward", ahead=False)
def flash_attn_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """`attend` with sdpa's meaning of a missing mask: the layer is causal by default, and row i sees the keys
    up to i. A static cache has more keys than that."""
    fits = query.dim() == key.dim() == value.dim() == 4  # else `attend` refuses
    rows = query.shape[2] if fits else 0
    packed = options.get("cache") is not None or options.get("cu_seq_lens_q") is not None
    if attention_mask is None and rows > 1 and not packed:
        causal = options.get("is_causal")
        options["is_causal"] = causal = getattr(module, "is_causal", True) if causal is None else causal
        if causal:
            key, value = key[:, :, :rows], value[:, :, :rows]
    return attend(module, query, key, value, attention_mask, **options)
