"""The operators as Python functions, documented. All work is in `torch.ops.fattn`.

Numbers that lie on the device (seq_lens, block_tables) cannot be checked without waiting for it: the kernels
clamp lengths to the capacity and take a block outside the pool for no key. With FATTN_CHECK=1 in the
environment every call waits, looks, and raises ValueError instead.
"""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from ._operands import public

__all__ = ["MAX_DECODE_ROWS", "decode", "prefill"]

# Query rows per sequence that the decode kernels take; longer queries are prefill's.
MAX_DECODE_ROWS = 16


@overload
def prefill(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = ...,
    *,
    mask_map: Tensor | None = ...,
    is_causal: bool = ...,
    q_offset: int | None = ...,
    window_left: int = ...,
    window_right: int = ...,
    sink_tokens: int = ...,
    sinks: Tensor | None = ...,
    alibi_slopes: Tensor | None = ...,
    softcap: float = ...,
    scale: float | None = ...,
    token_major_out: bool = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...
@overload
def prefill(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = ...,
    *,
    mask_map: Tensor | None = ...,
    is_causal: bool = ...,
    q_offset: int | None = ...,
    window_left: int = ...,
    window_right: int = ...,
    sink_tokens: int = ...,
    sinks: Tensor | None = ...,
    alibi_slopes: Tensor | None = ...,
    softcap: float = ...,
    scale: float | None = ...,
    token_major_out: bool = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
@overload
def prefill(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = ...,
    *,
    mask_map: Tensor | None = ...,
    is_causal: bool = ...,
    q_offset: int | None = ...,
    window_left: int = ...,
    window_right: int = ...,
    sink_tokens: int = ...,
    sinks: Tensor | None = ...,
    alibi_slopes: Tensor | None = ...,
    softcap: float = ...,
    scale: float | None = ...,
    token_major_out: bool = ...,
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]: ...
@public("fattn.prefill")
def prefill(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *,
    mask_map: Tensor | None = None,
    is_causal: bool = False,
    q_offset: int | None = None,
    window_left: int = -1,
    window_right: int = -1,
    sink_tokens: int = 0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float = 0.0,
    scale: float | None = None,
    token_major_out: bool = False,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of many query rows: `softmax(scale * query @ key^T + attn_mask) @ value`, tile by tile.

    Args:
        query: `[B, Hq, Lq, D]`, float32, float16 or bfloat16. D is a multiple of 8, 8 to 576.
        key: `[B, Hkv, Lk, D]` of the same dtype. `Hq % Hkv == 0`: query head h uses key-value
            head h // (Hq / Hkv).
        value: `[B, Hkv, Lk, Dv]` of the same dtype. Dv is a multiple of 8, 8 to 576, and need not equal D.
            The strides of query, key and value are arbitrary and independent of each other, 0 included; only
            an operand whose last dimension is not contiguous is copied.
        attn_mask: broadcastable to `[B, Hq, Lq, Lk]` and read through its strides, never expanded. bool: True
            = attend. float32, float16, bfloat16: added to the score in float32; -inf hides the key, whatever
            its memory holds.
        mask_map: what `torch_fattn.mask_map(attn_mask)` has made of this very mask; with the map of another
            one the result is undefined (with FATTN_CHECK=1 in the environment it is a ValueError). Cells of
            the mask that hide everything are then left out, as are any 8 keys that a cell hides, and cells
            that hide nothing are not read. Larger calls make a map for themselves; give one to make it once
            for all layers. It changes no bit of the result, unless keys or values hold infinities or NaN.
        is_causal: row i sees the keys up to position `q_offset + i`.
        q_offset: absolute position of row 0. Default `Lk - Lq`, which aligns the last row with the last key;
            0 is the alignment of `F.scaled_dot_product_attention`.
        window_left: a row at position p sees keys from `p - window_left` on; -1: all. Keys outside the
            windows of all rows of a tile are never loaded.
        window_right: and up to `p + window_right`; -1: all.
        sink_tokens: this many keys at the beginning stay visible outside the window.
        sinks: `[Hq]`, a logit per query head that takes part in the softmax and has no value. A row that sees
            no key has it as its lse. Any finite float32; -inf is none, +inf and NaN make the head NaN.
        alibi_slopes: `[Hq]` or `[B, Hq]`: slope * (key position - p) is added to the score. The result is
            undefined where that is beyond float32.
        softcap: c > 0, up to 1e30, turns a score s into `c * tanh(s / c)`, before all that is added to it.
            0: none.
        scale: factor of the score, finite. Default `D ** -0.5`.
        token_major_out: out lies in memory as `[B, Lq, Hq, Dv]`, of which it is the transposed view: the same
            numbers, and `out.transpose(1, 2).flatten(2)`, what an output projection multiplies, is no copy.
        return_lse: also return the logarithm of each row's softmax denominator.

    Under torch.autocast query, key and value are cast as `F.scaled_dot_product_attention` casts them.

    Few rows over many keys fill the GPU too: those of all query heads that share a key-value head are taken
    together, and the keys are cut into parts that a last pass merges, as `decode` does. No bit of the result
    of a sequence depends on the rest of the batch.

    Returns:
        out `[B, Hq, Lq, Dv]`, contiguous unless token_major_out, of the dtype of query; with `return_lse`
        also lse `[B, Hq, Lq]`, float32, natural logarithm, contiguous. A row that sees no key has out 0 and
        lse -inf.

    Raises:
        ValueError: shapes, strides or values that do not fit.
        TypeError: dtypes.
        NotImplementedError: not built.
        RuntimeError: from `backward`; the operators have no gradient.

    The method is FlashAttention (Dao et al. 2022, 2023): online softmax (Milakov & Gimelshein 2018; Rabe &
    Staats 2021) over tiles of keys, so that the score matrix never reaches memory. Keeping scores and result
    in simdgroup matrix registers follows ideas of MLX's "steel" attention and of llama.cpp's Metal kernels.
    """
    out, lse = torch.ops.fattn.prefill(
        query,
        key,
        value,
        attn_mask,
        mask_map=mask_map,
        is_causal=is_causal,
        q_offset=q_offset,
        window_left=window_left,
        window_right=window_right,
        sink_tokens=sink_tokens,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        softcap=softcap,
        scale=scale,
        token_major_out=token_major_out,
    )
    return (out, lse) if return_lse else out


@overload
def decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seq_lens: Tensor | None = ...,
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
def decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seq_lens: Tensor | None = ...,
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
def decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seq_lens: Tensor | None = ...,
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
@public("fattn.decode")
def decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seq_lens: Tensor | None = None,
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
    """Causal attention of the newest `Lq` tokens over a key-value cache.

    Args:
        query: `[B, Hq, Lq, D]`, Lq 1 to 16. Row i is the token at position `seq_len - Lq + i`.
        key, value: `[B, Hkv, capacity, D]` and `[B, Hkv, capacity, Dv]`, any strides; a cache is never
            copied. Of the dtype of query, or quantised.
        seq_lens: int32 `[B]` on the device of query: how many keys of each sequence are filled, the newest
            tokens included. Default: all of them. What lies behind them is never read. A length below 0 or
            above the capacity is clamped; with FATTN_CHECK=1 in the environment it raises ValueError.
        attn_mask: broadcastable to `[B, Hq, Lq, capacity]`, as in `prefill`.
        tree_mask: int64 `[Lq]` or `[B, Lq]`, for drafts that branch: bit t of row i says whether it sees the
            t-th of the newest Lq tokens, itself included. It hides more, and shows nothing that the other
            rules hide.
        window_right: without effect here, since rows are causal.
        key_scales, value_scales: of a quantised cache, of the shape of key and value without the last
            dimension, or with more in its place; on int8 and fp8_e4m3 any strides.
        kv_format: how key and value are stored. "auto" goes by their dtype: torch.int8 is "int8". A
            torch.uint8 cache needs its format named:

            "int8": int8, scales float32 `[B, Hkv, capacity]`: an element is `q * scale`.
            "fp8_e4m3": uint8, the bits of a torch.float8_e4m3fn; scales as for int8, or none.
            "int4": uint8, `[.., D / 2]`, the even column of two in the low four bits; scales float16
            `[B, Hkv, capacity, D / 32, 2]`, scale and minimum of 32 columns: `minimum + q * scale`. D and Dv
            are multiples of 32.

            `torch_fattn.reference.quantise` makes such caches, and says how far their elements are from what
            was quantised: e of a key moves a score by at most `scale * sum(abs(query)) * e`, e of a value the
            result by at most e. Reading adds no error to that: elements are multiplied as they are, or in
            float32.

    D and Dv are multiples of 8, 8 to 576. A value that is a view of the key, `key[..., :Dv]`, is read with it
    and not again: the latent vectors of multi-head latent attention (DeepSeek) are both. In an int4 cache its
    scales must be a view too, `key_scales[..., :Dv // 32, :]`. Dtypes, the remaining arguments, results and
    errors are those of `prefill`.

    The keys are cut into chunks whose partial results a second pass merges by log-sum-exp, so that a batch of
    one fills the GPU: "Flash-Decoding" (Dao, Haziza, Massa & Sizov 2023). The cuts are counted from key 0: no
    bit of a sequence's result depends on the rest of the batch or on the capacity.
    """
    out, lse = torch.ops.fattn.decode(
        query,
        key,
        value,
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
