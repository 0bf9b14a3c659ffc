"""The attention operators as Python functions, documented. All work is in `torch.ops.fattn`.

Numbers on the device (seq_lens, block_tables) cannot be checked without waiting for it: the kernels clamp
lengths to the capacity and skip blocks outside the pool. With FATTN_CHECK=1 in the environment every call
waits, checks them, and raises ValueError instead.
"""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import Unpack

from ..runtime.signatures import public
from .options import DecodeOptions, PagedPrefillOptions, PrefillOptions, VarlenPrefillOptions
from .return_lse import with_lse

__all__ = [
    "decode",
    "merge",
    "paged_decode",
    "paged_prefill",
    "prefill",
    "varlen_prefill",
]


@with_lse
@public("fattn.prefill", options="prefill")
def prefill(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *,
    return_lse: bool = False,
    **options: Unpack[PrefillOptions],
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of many query rows: `softmax(scale * query @ key^T + attn_mask) @ value`, tile by tile.

    Args:
        query: `[B, Hq, Lq, D]`, float32, float16 or bfloat16. D is a multiple of 8, 8 to 576.
        key: `[B, Hkv, Lk, D]` of the same dtype. `Hq % Hkv == 0`: query head h uses key-value
            head h // (Hq / Hkv).
        value: `[B, Hkv, Lk, Dv]` of the same dtype. Dv is a multiple of 8, 8 to 576, and need not equal D.
            Query, key and value may have any strides, 0 included; an operand is copied only if its last
            dimension is not contiguous.
        attn_mask: broadcastable to `[B, Hq, Lq, Lk]`, read through its strides and never expanded. bool: True
            = attend. float32, float16, bfloat16: added to the score in float32; -inf hides the key, even if
            its memory is NaN.
        return_lse: also return the logarithm of each row's softmax denominator.

    Under torch.autocast, query, key and value are cast as in `F.scaled_dot_product_attention`.

    To fill the GPU with few rows over many keys, the rows of all query heads that share a key-value head form
    one tile, and the keys are split into parts that a last pass merges, as in `decode`. Results are
    batch-invariant, bit for bit.

    Returns:
        out `[B, Hq, Lq, Dv]`, of the dtype of query, contiguous unless token_major_out; with `return_lse`
        also lse `[B, Hq, Lq]`, float32, natural logarithm, contiguous. A row that sees no key has out 0 and
        lse -inf.

    Raises:
        ValueError: shapes, strides or values that do not fit.
        TypeError: dtypes.
        NotImplementedError: not built.
        RuntimeError: from `backward`; `attention` is this operator with gradients.

    The method is FlashAttention (Dao et al. 2022, 2023): online softmax (Milakov & Gimelshein 2018; Rabe &
    Staats 2021) over tiles of keys, so that the score matrix is never written to memory. Scores and result
    stay in simdgroup matrix registers, as in MLX's "steel" attention and llama.cpp's Metal kernels.
    """
    out, lse = torch.ops.fattn.prefill(query, key, value, attn_mask, **options)
    return (out, lse) if return_lse else out


@with_lse
@public("fattn.decode", options="decode")
def decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seq_lens: Tensor | None = None,
    *,
    return_lse: bool = False,
    **options: Unpack[DecodeOptions],
) -> Tensor | tuple[Tensor, Tensor]:
    """Causal attention of the newest `Lq` tokens over a key-value cache.

    Args:
        query: `[B, Hq, Lq, D]`; with a tree_mask Lq is at most 64. Row i is the token at position
            `seq_len - Lq + i`. More than 16 rows run on the kernels of `prefill`.
        key, value: `[B, Hkv, capacity, D]` and `[B, Hkv, capacity, Dv]`, any strides; a cache is never
            copied. The dtype of query, or of a quantised cache.
        seq_lens: int32 `[B]` on the device of query: the number of filled keys of each sequence, newest
            tokens included. Default: the capacity. Later memory is never read. A length below 0 or above the
            capacity is clamped; with FATTN_CHECK=1 in the environment it raises ValueError.
        return_lse: also return lse.

    D and Dv are multiples of 8, 8 to 576. A value that is a view of the key, `key[..., :Dv]`, as in
    multi-head latent attention (DeepSeek), is read only once. In an int4 cache its scales must be a view too,
    `key_scales[..., :Dv // 32, :]`. Dtypes, results and errors are those of `prefill`.

    The keys are split into chunks whose partial results a second pass merges by log-sum-exp, so that a batch
    of one fills the GPU: "Flash-Decoding" (Dao, Haziza, Massa & Sizov 2023). Chunks are counted from key 0,
    so results do not depend on the rest of the batch or the capacity, bit for bit.
    """
    out, lse = torch.ops.fattn.decode(query, key, value, seq_lens, **options)
    return (out, lse) if return_lse else out


@with_lse
@public("fattn.paged_decode", options="paged_decode")
def paged_decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    return_lse: bool = False,
    **options: Unpack[DecodeOptions],
) -> Tensor | tuple[Tensor, Tensor]:
    """`decode` over a paged cache: the keys of a sequence are in blocks of a common pool.

    Args:
        query: `[B, Hq, Lq, D]`, as in `decode`.
        key_cache, value_cache: `[num_blocks, block_size, Hkv, D]` and `[.., Dv]`, any strides: a pool
            `[num_blocks, Hkv, block_size, D]` is passed as `pool.transpose(1, 2)`. Any block_size from 1.
        block_tables: int32 `[B, max_blocks]`: the blocks of each sequence in order. Entries past the end of
            the sequence (often -1) are never read.
        seq_lens: int32 `[B]` on the device of query, newest tokens included.
        attn_mask: broadcastable to `[B, Hq, Lq, max_blocks * block_size]`.
        key_scales, value_scales: `[num_blocks, block_size, Hkv]`; int4: `[.., Hkv, D / 32, 2]`.
        return_lse: also return lse.

    Results are those of `decode`. A table entry outside the pool holds no keys; with FATTN_CHECK=1 in the
    environment it raises ValueError.

    Block tables are those of vLLM's PagedAttention (Kwon et al. 2023).
    """
    out, lse = torch.ops.fattn.paged_decode(query, key_cache, value_cache, block_tables, seq_lens, **options)
    return (out, lse) if return_lse else out


@with_lse
@public("fattn.paged_prefill", options="paged_prefill")
def paged_prefill(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    *,
    is_causal: bool,
    return_lse: bool = False,
    **options: Unpack[PagedPrefillOptions],
) -> Tensor | tuple[Tensor, Tensor]:
    """`prefill` of the newest rows of many sequences, packed into one tensor, over paged caches: prompts,
    chunks of prompts and single tokens in one batch.

    Args:
        query: `[T, Hq, D]`, sequence after sequence.
        key_cache, value_cache, block_tables, seq_lens: as in `paged_decode`; the caches already contain the
            keys and values of the query's tokens.
        cu_seqlens_q: int32 `[B + 1]` on the device of query: sequence b has the rows from `cu_seqlens_q[b]`
            to `cu_seqlens_q[b + 1]`, which may be none. Row i of `n` is the token at position
            `seq_lens[b] - n + i`.
        max_seqlen_q: the maximum number of rows of a sequence, used for planning. Results do not depend on
            it, except on CUDA, where rows beyond it are NaN.
        is_causal: a row at position p sees the keys up to p. There is no default, since `decode` is always
            causal, and `prefill` only on request.
        key_scales, value_scales: as in `paged_decode`.
        return_lse: also return lse.

    Returns:
        out `[T, Hq, Dv]`, contiguous, of the dtype of query; with `return_lse` also lse `[Hq, T]`, float32.
        Rows from `cu_seqlens_q[B]` on belong to no sequence; their result is that of a row that sees no key.

    Entries of cu_seqlens_q that decrease are raised to the entry before, and entries above T are clamped to
    T; with FATTN_CHECK=1 in the environment they raise ValueError, as do a first entry other than 0 and a
    sequence of more than max_seqlen_q rows.
    """
    out, lse = torch.ops.fattn.paged_prefill(
        *(query, key_cache, value_cache, block_tables, seq_lens, cu_seqlens_q, max_seqlen_q),
        is_causal=is_causal,
        **options,
    )
    return (out, lse) if return_lse else out


@with_lse
@public("fattn.varlen_prefill", options="varlen_prefill")
def varlen_prefill(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    return_lse: bool = False,
    **options: Unpack[VarlenPrefillOptions],
) -> Tensor | tuple[Tensor, Tensor]:
    """`prefill` of many sequences of different lengths, packed into one tensor without padding, such as the
    prompts of a batch or the images of an encoder.

    Args:
        query: `[Tq, Hq, D]`, sequence after sequence.
        key, value: `[Tk, Hkv, D]` and `[Tk, Hkv, Dv]`, likewise. Strides, dtypes and head dims are those of
            `prefill`.
        cu_seqlens_q, cu_seqlens_k: int32 `[B + 1]` on the device of query: sequence b has the rows from
            `cu_seqlens_q[b]` to `cu_seqlens_q[b + 1]`, and the keys likewise. Either may be empty.
        max_seqlen_q, max_seqlen_k: the maximum numbers of rows and keys of a sequence, used for planning.
            Results do not depend on them, except on CUDA, where rows beyond max_seqlen_q and sequences of
            more keys are NaN.
        q_offset: absolute position of row 0 of every sequence. Default: its number of keys minus its number
            of rows, which aligns the last row with the last key; 0 aligns the first ones.
        return_lse: also return lse.

    Positions are counted from the beginning of each sequence.

    Returns:
        out `[Tq, Hq, Dv]`, contiguous, of the dtype of query; with `return_lse` also lse `[Hq, Tq]`, float32.
        Rows before `cu_seqlens_q[0]` and from `cu_seqlens_q[B]` on belong to no sequence; their result is
        that of a row that sees no key.

    Entries of cu_seqlens_q that decrease are raised to the entry before. A sequence whose entries of
    cu_seqlens_k decrease has no keys. Entries above Tq or Tk are clamped. With FATTN_CHECK=1 in the
    environment all of them raise ValueError, as do first entries other than 0 and a sequence of more than
    max_seqlen_q rows or max_seqlen_k keys.

    Padding costs nothing: per key-value head, a launch has at most B + 1 threadgroups more than tiles of
    rows, and these exit at once.
    """
    out, lse = torch.ops.fattn.varlen_prefill(
        query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **options
    )
    return (out, lse) if return_lse else out


@with_lse
@public("fattn.merge")
def merge(outs: Tensor, lses: Tensor, *, return_lse: bool = False) -> Tensor | tuple[Tensor, Tensor]:
    """Combine attention over disjoint sets of keys into attention over their union.

    Args:
        outs: `[N, B, H, L, D]`, the `out` of N calls, float32, float16 or bfloat16; of packed operators
            `[N, T, H, D]`.
        lses: float32 `[N, B, H, L]`, their `lse`; of packed operators `[N, H, T]`. A part whose lse is -inf
            saw no key and has weight 0.

    Returns:
        out `[B, H, L, D]` or `[T, H, D]` in the dtype of outs; with `return_lse` also lse
        `[B, H, L]` or `[H, T]`, float32.
    """
    if outs.dim() == 4 and lses.dim() == 3:  # the operator also takes rows before heads
        if lses.transpose(1, 2).shape != outs.shape[:-1]:
            raise ValueError(
                f"fattn.merge: outs of packed parts has shape {list(outs.shape)} and lses "
                f"{list(lses.shape)}; pass lses as [parts, heads, tokens]"
            )
        out, lse = torch.ops.fattn.merge(outs[:, None], lses.transpose(1, 2)[:, None])
        return (out[0], lse[0].t().contiguous()) if return_lse else out[0]
    out, lse = torch.ops.fattn.merge(outs, lses)
    return (out, lse) if return_lse else out
