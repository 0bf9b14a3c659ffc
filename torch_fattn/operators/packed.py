"""The operators whose query holds the rows of many sequences one after the other, as Python functions."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from ..runtime.signatures import public

__all__ = ["paged_prefill", "varlen_prefill"]


@overload
def paged_prefill(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    *,
    is_causal: bool = ...,
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
    return_lse: Literal[False] = ...,
) -> Tensor: ...
@overload
def paged_prefill(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    *,
    is_causal: bool = ...,
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
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
@overload
def paged_prefill(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    *,
    is_causal: bool = ...,
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
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]: ...
@public("fattn.paged_prefill")
def paged_prefill(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    *,
    is_causal: bool = True,
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
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """`prefill` of the newest rows of many sequences, packed into one tensor, over the pools of
    `paged_decode`: prompts, chunks of prompts and single tokens in one batch.

    Args:
        query: `[T, Hq, D]`, the rows of one sequence after those of another.
        key_cache, value_cache, block_tables, seq_lens: as in `paged_decode`; keys and values of the query's
            own tokens have been written there.
        cu_seqlens_q: int32 `[B + 1]` on the device of query: sequence b has the rows from `cu_seqlens_q[b]`
            to `cu_seqlens_q[b + 1]`, of any number, 0 included. Row i of `n` is the token at position
            `seq_lens[b] - n + i`.
        max_seqlen_q: the most rows that a sequence has; a larger number will do.
        is_causal: True unless you say otherwise.
        window_left, window_right, sink_tokens, sinks, alibi_slopes, softcap, scale, return_lse: as in
            `prefill`.
        key_scales, value_scales, kv_format: as in `paged_decode`.

    Returns:
        out `[T, Hq, Dv]`, contiguous, of the dtype of query; with `return_lse` also lse `[Hq, T]`, float32.
        Rows from `cu_seqlens_q[B]` on belong to no sequence; they have the result of a row that sees no key.

    Entries of cu_seqlens_q that decrease, or lie beyond T, are cut to those before them, or to T; with
    FATTN_CHECK=1 in the environment they raise ValueError, as do a first entry other than 0 and a sequence of
    more than max_seqlen_q rows.
    """
    out, lse = torch.ops.fattn.paged_prefill(
        query,
        key_cache,
        value_cache,
        block_tables,
        seq_lens,
        cu_seqlens_q,
        max_seqlen_q,
        is_causal=is_causal,
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
    )
    return (out, lse) if return_lse else out


@overload
def varlen_prefill(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    is_causal: bool = ...,
    q_offset: int | None = ...,
    window_left: int = ...,
    window_right: int = ...,
    sink_tokens: int = ...,
    sinks: Tensor | None = ...,
    alibi_slopes: Tensor | None = ...,
    softcap: float = ...,
    scale: float | None = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...
@overload
def varlen_prefill(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    is_causal: bool = ...,
    q_offset: int | None = ...,
    window_left: int = ...,
    window_right: int = ...,
    sink_tokens: int = ...,
    sinks: Tensor | None = ...,
    alibi_slopes: Tensor | None = ...,
    softcap: float = ...,
    scale: float | None = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
@overload
def varlen_prefill(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    is_causal: bool = ...,
    q_offset: int | None = ...,
    window_left: int = ...,
    window_right: int = ...,
    sink_tokens: int = ...,
    sinks: Tensor | None = ...,
    alibi_slopes: Tensor | None = ...,
    softcap: float = ...,
    scale: float | None = ...,
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]: ...
@public("fattn.varlen_prefill")
def varlen_prefill(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    is_causal: bool = False,
    q_offset: int | None = None,
    window_left: int = -1,
    window_right: int = -1,
    sink_tokens: int = 0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float = 0.0,
    scale: float | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """`prefill` of many sequences of their own lengths, packed into one tensor without padding: the prompts
    of a batch, the images of an encoder, the samples of a document.

    Args:
        query: `[Tq, Hq, D]`, the rows of one sequence after those of another.
        key, value: `[Tk, Hkv, D]` and `[Tk, Hkv, Dv]`, likewise. Strides, dtypes and head dims are those of
            `prefill`.
        cu_seqlens_q, cu_seqlens_k: int32 `[B + 1]` on the device of query: sequence b has the rows from
            `cu_seqlens_q[b]` to `cu_seqlens_q[b + 1]`, and the keys likewise, any number of either, 0
            included.
        max_seqlen_q, max_seqlen_k: the most rows, and keys, that a sequence has; larger numbers will do.
        is_causal: row i of a sequence sees its keys up to position `q_offset + i`.
        q_offset: absolute position of row 0 of every sequence. Default: the number of its keys less that of
            its rows, which aligns its last row with its last key; 0 aligns the first ones.
        window_left, window_right, sink_tokens, sinks, alibi_slopes, softcap, scale, return_lse: as in
            `prefill`; positions are counted from the beginning of each sequence.

    Returns:
        out `[Tq, Hq, Dv]`, contiguous, of the dtype of query; with `return_lse` also lse `[Hq, Tq]`, float32.
        Rows before `cu_seqlens_q[0]` and from `cu_seqlens_q[B]` on belong to no sequence; they have the
        result of a row that sees no key.

    Entries of cu_seqlens_q that decrease, or lie beyond Tq, are cut to those before them, or to Tq. A
    sequence whose entries of cu_seqlens_k decrease has no key; those beyond Tk are cut to it, and of a
    sequence of more than max_seqlen_k keys the first are taken. With FATTN_CHECK=1 in the environment all of
    them raise ValueError, as do first entries other than 0 and a sequence of more than max_seqlen_q rows.

    No work is spent on padding. A launch has at most B + 1 threadgroups for each key-value head more than
    there are tiles of rows; they end at once.
    """
    out, lse = torch.ops.fattn.varlen_prefill(
        query,
        key,
        value,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        is_causal=is_causal,
        q_offset=q_offset,
        window_left=window_left,
        window_right=window_right,
        sink_tokens=sink_tokens,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        softcap=softcap,
        scale=scale,
    )
    return (out, lse) if return_lse else out
