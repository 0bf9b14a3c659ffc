"""The shapes of the operators' results, for tensors without data: meta tensors, torch.compile, export."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def register() -> None:
    torch.library.register_fake("fattn::prefill", _fake_attention)
    torch.library.register_fake("fattn::decode", _fake_attention)
    torch.library.register_fake("fattn::paged_decode", _fake_attention)
    torch.library.register_fake("fattn::merge", _fake_merge)
    torch.library.register_fake("fattn::_refuse_backward", torch.empty_like)


def _fake_attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    """value is `[B, Hkv, Lk, Dv]`, or a pool `[num_blocks, block_size, Hkv, Dv]`: Dv is last either way."""
    batch, heads, q_len, _head_dim = query.shape
    return (
        query.new_empty(batch, heads, q_len, value.shape[-1]),
        query.new_empty(batch, heads, q_len, dtype=torch.float32),
    )


def _fake_merge(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    return outs.new_empty(outs.shape[1:]), lses.new_empty(lses.shape[1:])
