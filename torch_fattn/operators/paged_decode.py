"""`paged_decode`: what `decode` is, with keys and values in the blocks of a pool."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from ..runtime.signatures import public

__all__ = ["paged_decode"]


@overload
def paged_decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    attn_mask: Tensor | None = ...,
    tree_mask: Tensor | None = ...,
    window_left: int = ...,
    window_right: int = ...,
    sink_tokens: int = ...,
    sinks: Tensor | None = ...,
    alibi_slopes: Tensor | None = ...,
    softcap: float = ...,
    scale: float | None = ...,
    key_scales: Tensor | None = ...,
    value_scales: Tensor | None = ...,
    kv_format: str = ...,
    token_major_out: bool = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...
@overload
def paged_decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    attn_mask: Tensor | None = ...,
    tree_mask: Tensor | None = ...,
    window_left: int = ...,
    window_right: int = ...,
    sink_tokens: int = ...,
    sinks: Tensor | None = ...,
    alibi_slopes: Tensor | None = ...,
    softcap: float = ...,
    scale: float | None = ...,
    key_scales: Tensor | None = ...,
    value_scales: Tensor | None = ...,
    kv_format: str = ...,
    token_major_out: bool = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
@overload
def paged_decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    attn_mask: Tensor | None = ...,
    tree_mask: Tensor | None = ...,
    window_left: int = ...,
    window_right: int = ...,
    sink_tokens: int = ...,
    sinks: Tensor | None = ...,
    alibi_slopes: Tensor | None = ...,
    softcap: float = ...,
    scale: float | None = ...,
    key_scales: Tensor | None = ...,
    value_scales: Tensor | None = ...,
    kv_format: str = ...,
    token_major_out: bool = ...,
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]: ...
@public("fattn.paged_decode")
def paged_decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    attn_mask: Tensor | None = None,
    tree_mask: Tensor | None = None,
    window_left: int = -1,
    window_right: int = -1,
    sink_tokens: int = 0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float = 0.0,
    scale: float | None = None,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    kv_format: str = "auto",
    token_major_out: bool = False,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """`decode` over a cache whose sequences lie scattered over the blocks of a common pool.

    Args:
        query: `[B, Hq, Lq, D]`, Lq 1 to 16.
        key_cache, value_cache: `[num_blocks, block_size, Hkv, D]` and `[.., Dv]`, any strides: a pool
            `[num_blocks, Hkv, block_size, D]` is passed as `pool.transpose(1, 2)`. Any block_size from 1.
        block_tables: int32 `[B, max_blocks]`: the blocks of each sequence in order. Entries past the end of
            the sequence are never read (often -1).
        seq_lens: int32 `[B]`, on the device of query, the newest tokens included.
        attn_mask: broadcastable to `[B, Hq, Lq, max_blocks * block_size]`.
        key_scales, value_scales: `[num_blocks, block_size, Hkv]`, and for int4 `[.., D / 32, 2]` behind that.

    Everything else is as in `decode`. A table entry that the pool does not have counts as no key; with
    FATTN_CHECK=1 in the environment it raises ValueError.

    Block tables are vLLM's PagedAttention (Kwon et al. 2023).
    """
    out, lse = torch.ops.fattn.paged_decode(
        query,
        key_cache,
        value_cache,
        block_tables,
        seq_lens,
        attn_mask=attn_mask,
        tree_mask=tree_mask,
        window_left=window_left,
        window_right=window_right,
        sink_tokens=sink_tokens,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        softcap=softcap,
        scale=scale,
        key_scales=key_scales,
        value_scales=value_scales,
        kv_format=kv_format,
        token_major_out=token_major_out,
    )
    return (out, lse) if return_lse else out
