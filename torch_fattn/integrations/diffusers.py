"""torch_fattn as the native attention backend of diffusers on mps:

    from torch_fattn.integrations import diffusers
    diffusers.register()

diffusers' names of backends are a closed list, so its "native" one, which is also its default, is wrapped:
on mps it is `torch_fattn.sdpa`, elsewhere what it was. `torch_fattn.install()` does as much for every library
at once; this leaves all others alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from .. import sdpa

__all__ = ["register", "unregister"]

_before: Callable[..., Any] | None = None


def register() -> None:
    """Calling it again changes nothing."""
    global _before
    backends, native = _registry()
    if _before is None:
        _before = backends[native]
        backends[native] = _attention


def unregister() -> None:
    """Puts diffusers' own function back."""
    global _before
    if _before is not None:
        backends, native = _registry()
        backends[native] = _before
        _before = None


def _registry() -> tuple[dict[Any, Callable[..., Any]], Any]:
    try:
        from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
    except ImportError as error:
        raise ImportError(
            "torch_fattn.integrations.diffusers needs diffusers 0.35 or later, with its attention backends "
            f"({error})"
        ) from error
    return _AttentionBackendRegistry._backends, AttentionBackendName.NATIVE


def _attention(
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
    """`[B, L, H, D]`, as diffusers has it. A mask `[B, Lk]` is of keys. The other arguments, where they are
    set, ask for what only diffusers' own function does."""
    if query.device.type != "mps" or any(option not in (None, False) for option in others.values()):
        assert _before is not None
        return _before(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa=enable_gqa, **others
        )
    if attn_mask is not None and attn_mask.shape == (query.shape[0], key.shape[1]):
        attn_mask = attn_mask[:, None, None]
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    out = sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    return out.transpose(1, 2)
