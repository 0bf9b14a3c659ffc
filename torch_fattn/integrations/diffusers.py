"""torch_fattn as the native attention backend of diffusers on mps:

    from torch_fattn.integrations import diffusers
    diffusers.register()

diffusers has a fixed list of backend names, so this wraps its "native" backend, the default: on mps it
becomes `torch_fattn.sdpa`, on other devices it is unchanged. This covers models whose attention goes through
diffusers' dispatcher (Flux, Wan, LTX and most other transformers). UNets and most VAEs call torch's function
directly: use `torch_fattn.install()` for those and for other libraries.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..patterns.attention import Pattern
from .pytorch.sdpa import has_kernel, sdpa

__all__ = ["register", "unregister"]


class _Attention:
    """Replaces the function `before` while active."""

    def __init__(self, before: Callable[..., Any]) -> None:
        self.before = before
        self.on = True
        self.pattern: Pattern | None = None

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        **others: Any,
    ) -> Any:
        """Attention of `[B, L, H, D]`, diffusers' layout. A mask `[B, Lk]` hides keys. diffusers' own
        function runs if any other argument is set."""
        asked = any(option is not None and option is not False for option in others.values())
        operands = (query, key, value)
        if any(not isinstance(operand, Tensor) or operand.dim() != 4 for operand in operands):
            asked = True  # diffusers' own function reports the error
        if asked or not self.on or query.device.type != "mps":
            return self.before(
                query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa=enable_gqa, **others
            )
        if attn_mask is not None and attn_mask.shape == (query.shape[0], key.shape[1]):
            attn_mask = attn_mask[:, None, None]
        query, key, value = (operand.transpose(1, 2) for operand in operands)
        out = None
        is_plain = attn_mask is None and not dropout_p and not is_causal
        if self.pattern is not None and is_plain and has_kernel(query, key, value, None, scale, enable_gqa):
            out = self.pattern.attention(query, key, value, scale=scale)
        if out is None:
            out = sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        return out.transpose(1, 2)


_attention: _Attention | None = None


def register(pattern: Pattern | None = None) -> None:
    """Wraps diffusers' "native" backend.

    Args:
        pattern: what replaces long self-attention without a mask, such as
            `torch_fattn.patterns.Pattern(0.3)`: an approximation. All other calls stay exact. Another
            call replaces it: to keep the first steps exact, call `register(pattern)` in the pipeline's
            `callback_on_step_end`.
    """
    global _attention
    if pattern is not None and not isinstance(pattern, Pattern):
        raise TypeError(
            "torch_fattn.integrations.diffusers.register: pattern is of type "
            f"{type(pattern).__name__}; pass a Pattern or None"
        )
    backends, native = _registry()
    if _attention is None:
        _attention = backends[native] = _Attention(backends[native])
    _attention.pattern = pattern


def unregister() -> None:
    """Restores the previous function. If another wrapper encloses this one, it stays and calls the previous
    function."""
    global _attention
    if _attention is not None:
        backends, native = _registry()
        if backends[native] is _attention:
            backends[native] = _attention.before
        _attention.on = False
        _attention = None


def _registry() -> tuple[dict[Any, Callable[..., Any]], Any]:
    try:
        from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
    except ImportError as error:
        raise ImportError(
            "torch_fattn.integrations.diffusers needs diffusers 0.35 or later, with its attention backends: "
            f"pip install 'diffusers>=0.35' ({error})"
        ) from error
    return _AttentionBackendRegistry._backends, AttentionBackendName.NATIVE
