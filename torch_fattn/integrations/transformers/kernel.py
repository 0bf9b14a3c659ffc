"""What transformers looks for in a kernel from the Hub: `flash_attn_forward`, and that there is one.

A package of the `kernels` library that has these two names becomes an attention implementation under the name
of its repository, without `register()`, and is handed the masks of sdpa attention. transformers from 5.23 on
batches continuously with it if "flash" is in that name.
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
    """`attend`, where no mask means what it means to sdpa attention: a layer that says nothing is causal, and
    row i sees the keys up to i, of which a static cache has more."""
    fits = query.dim() == key.dim() == value.dim() == 4  # else `attend` refuses
    rows = query.shape[2] if fits else 0
    packed = options.get("cache") is not None or options.get("cu_seq_lens_q") is not None
    if attention_mask is None and rows > 1 and not packed:
        causal = options.get("is_causal")
        options["is_causal"] = causal = getattr(module, "is_causal", True) if causal is None else causal
        if causal:
            key, value = key[:, :, :rows], value[:, :, :rows]
    return attend(module, query, key, value, attention_mask, **options)
