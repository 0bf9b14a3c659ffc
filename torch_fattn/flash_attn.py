"""The functions of flash-attn 2.8 under their names, with its layouts, argument order and defaults:

    from torch_fattn.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

Tensors are `[batch, length, heads, head_dim]`, packed ones `[total, heads, head_dim]`; causal is that of the
lower right corner; a row that sees no key is 0, and its log-sum-exp -inf. Head sizes that are no multiple of
8 are padded, but not in a cache. There is no backward and no dropout. `deterministic` and `num_splits` change
nothing: results are always the same from run to run.
"""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from ._flash_attn_cache import append, rotate
from ._flash_attn_options import (
    Result,
    Window,
    causal_alibi,
    refuse_dropout,
    result,
    sees_no_later_key,
    window,
)
from ._flash_attn_varlen import (
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from ._head_padding import HEAD_STEP, pad_heads, without_padding
from ._ops import MAX_DECODE_ROWS
from ._route import is_plain, torchs

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]


# fmt: off
@overload
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = ..., softmax_scale: float | None = ...,
    causal: bool = ..., window_size: Window = ..., softcap: float = ...,
    alibi_slopes: Tensor | None = ..., deterministic: bool = ...,
    return_attn_probs: Literal[False] = ...,
) -> Tensor: ...
@overload
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = ..., softmax_scale: float | None = ...,
    causal: bool = ..., window_size: Window = ..., softcap: float = ...,
    alibi_slopes: Tensor | None = ..., deterministic: bool = ..., *,
    return_attn_probs: Literal[True],
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = ..., softmax_scale: float | None = ...,
    causal: bool = ..., window_size: Window = ..., softcap: float = ...,
    alibi_slopes: Tensor | None = ..., deterministic: bool = ..., return_attn_probs: bool = ...,
) -> Result: ...
# fmt: on
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """q `[B, Lq, Hq, D]`, k and v `[B, Lk, Hkv, D]`: out like q. With return_attn_probs also the log-sum-exp
    `[B, Hq, Lq]` and, as flash-attn does without dropout, an empty tensor."""
    refuse_dropout("flash_attn_func", dropout_p)
    limits = {**window(window_size), "softcap": softcap}
    if alibi_slopes is None and not return_attn_probs and is_plain(limits):
        heads_first = (tensor.transpose(1, 2) for tensor in (q, k, v))
        out = torchs(*heads_first, is_causal=causal, scale=softmax_scale)
        if out is not None:
            return out.transpose(1, 2).contiguous()
    value_dim = v.shape[-1]
    q, k, v, scale = pad_heads(q, k, v, softmax_scale)
    query, key, value = (tensor.transpose(1, 2) for tensor in (q, k, v))
    options: dict[str, Any] = {**limits, "scale": scale, "token_major_out": True}
    mask = None
    if alibi_slopes is not None and alibi_slopes.dim() == 1 and sees_no_later_key(causal, window_size):
        options["alibi_slopes"] = alibi_slopes
    elif alibi_slopes is not None:
        mask = _alibi(alibi_slopes, q.shape[1], k.shape[1])
    if q.shape[1] == 1 or (causal and q.shape[1] <= MAX_DECODE_ROWS):
        out, lse = torch.ops.fattn.decode(query, key, value, attn_mask=mask, **options)
    else:
        out, lse = torch.ops.fattn.prefill(query, key, value, mask, is_causal=causal, **options)
    return result(without_padding(out.transpose(1, 2), value_dim), lse, return_attn_probs)


# fmt: off
@overload
def flash_attn_qkvpacked_func(
    qkv: Tensor, dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ...,
    window_size: Window = ..., softcap: float = ..., alibi_slopes: Tensor | None = ...,
    deterministic: bool = ..., return_attn_probs: Literal[False] = ...,
) -> Tensor: ...
@overload
def flash_attn_qkvpacked_func(
    qkv: Tensor, dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ...,
    window_size: Window = ..., softcap: float = ..., alibi_slopes: Tensor | None = ...,
    deterministic: bool = ..., *, return_attn_probs: Literal[True],
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def flash_attn_qkvpacked_func(
    qkv: Tensor, dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ...,
    window_size: Window = ..., softcap: float = ..., alibi_slopes: Tensor | None = ...,
    deterministic: bool = ..., return_attn_probs: bool = ...,
) -> Result: ...
# fmt: on
def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_func` of qkv `[B, L, 3, H, D]`, which is not copied."""
    q, k, v = qkv.unbind(2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs,
    )  # fmt: skip


# fmt: off
@overload
def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor, dropout_p: float = ..., softmax_scale: float | None = ...,
    causal: bool = ..., window_size: Window = ..., softcap: float = ...,
    alibi_slopes: Tensor | None = ..., deterministic: bool = ...,
    return_attn_probs: Literal[False] = ...,
) -> Tensor: ...
@overload
def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor, dropout_p: float = ..., softmax_scale: float | None = ...,
    causal: bool = ..., window_size: Window = ..., softcap: float = ...,
    alibi_slopes: Tensor | None = ..., deterministic: bool = ..., *,
    return_attn_probs: Literal[True],
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor, dropout_p: float = ..., softmax_scale: float | None = ...,
    causal: bool = ..., window_size: Window = ..., softcap: float = ...,
    alibi_slopes: Tensor | None = ..., deterministic: bool = ..., return_attn_probs: bool = ...,
) -> Result: ...
# fmt: on
def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_func` of kv `[B, Lk, 2, Hkv, D]`, which is not copied."""
    k, v = kv.unbind(2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs,
    )  # fmt: skip


# fmt: off
@overload
def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = ..., v: Tensor | None = ...,
    rotary_cos: Tensor | None = ..., rotary_sin: Tensor | None = ...,
    cache_seqlens: int | Tensor | None = ..., cache_batch_idx: Tensor | None = ...,
    cache_leftpad: Tensor | None = ..., block_table: Tensor | None = ...,
    softmax_scale: float | None = ..., causal: bool = ..., window_size: Window = ...,
    softcap: float = ..., rotary_interleaved: bool = ..., alibi_slopes: Tensor | None = ...,
    num_splits: int = ..., return_softmax_lse: Literal[False] = ...,
) -> Tensor: ...
@overload
def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = ..., v: Tensor | None = ...,
    rotary_cos: Tensor | None = ..., rotary_sin: Tensor | None = ...,
    cache_seqlens: int | Tensor | None = ..., cache_batch_idx: Tensor | None = ...,
    cache_leftpad: Tensor | None = ..., block_table: Tensor | None = ...,
    softmax_scale: float | None = ..., causal: bool = ..., window_size: Window = ...,
    softcap: float = ..., rotary_interleaved: bool = ..., alibi_slopes: Tensor | None = ...,
    num_splits: int = ..., *, return_softmax_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
@overload
def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = ..., v: Tensor | None = ...,
    rotary_cos: Tensor | None = ..., rotary_sin: Tensor | None = ...,
    cache_seqlens: int | Tensor | None = ..., cache_batch_idx: Tensor | None = ...,
    cache_leftpad: Tensor | None = ..., block_table: Tensor | None = ...,
    softmax_scale: float | None = ..., causal: bool = ..., window_size: Window = ...,
    softcap: float = ..., rotary_interleaved: bool = ..., alibi_slopes: Tensor | None = ...,
    num_splits: int = ..., return_softmax_lse: bool = ...,
) -> Tensor | tuple[Tensor, Tensor]: ...
# fmt: on
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over a cache, to which k and v `[B, Lnew, Hkv, D]` are first appended, in place, at
    cache_seqlens; with rotary_cos and rotary_sin `[positions, rotary_dim / 2]` they and q are rotated.

    q `[B, Lq, Hq, D]`; the caches are `[batch, capacity, Hkv, D]`, of which cache_batch_idx `[B]` may pick,
    or with a block_table `[B, blocks]` pools of blocks of any size. Returns out like q, and the log-sum-exp
    `[B, Hq, Lq]` if asked for. A key that has no place in the cache is dropped.
    """
    op = "flash_attn_with_kvcache"
    if cache_leftpad is not None:
        raise NotImplementedError(f"torch_fattn.{op}: cache_leftpad is not supported; pad on the right")
    if block_table is not None and cache_batch_idx is not None:
        raise ValueError(f"torch_fattn.{op}: block_table already says where the keys of a sequence are; "
                         "leave out cache_batch_idx")  # fmt: skip
    if (k is None) != (v is None):
        raise ValueError(f"torch_fattn.{op}: one of k and v is None; pass both or neither")
    if rotary_cos is not None and (k is None or rotary_sin is None):
        raise ValueError(f"torch_fattn.{op}: rotary_cos needs rotary_sin, and k and v to rotate; pass them")
    if odd := [tensor.shape[-1] for tensor in (q, k_cache, v_cache) if tensor.shape[-1] % HEAD_STEP]:
        raise ValueError(
            f"torch_fattn.{op}: a head size of {odd[0]} is no multiple of {HEAD_STEP}, and a cache cannot be "
            "padded in place; widen cache, q, k and v by zeros and pass the true size's softmax_scale"
        )
    batch, q_len = q.shape[:2]
    if block_table is None:  # every sequence of a dense cache is one block
        if cache_batch_idx is None and k_cache.shape[0] < batch:
            raise ValueError(
                f"torch_fattn.{op}: q has batch size {batch} and k_cache {k_cache.shape[0]}; pass a cache of "
                "as many sequences, or cache_batch_idx"
            )
        rows = torch.arange(batch, device=q.device) if cache_batch_idx is None else cache_batch_idx
        table = rows.to(torch.int32)[:, None]
    else:
        table = block_table
    lens = _lengths(op, cache_seqlens, k is not None, batch, table.shape[1] * k_cache.shape[1], q.device)
    if k is not None and v is not None:
        if rotary_cos is not None and rotary_sin is not None:
            # Rows that see the same keys are all at the position of the first.
            by_position = causal or max(window(window_size).values()) >= 0
            q = rotate(q, lens, rotary_cos, rotary_sin, rotary_interleaved, advances=by_position)
            k = rotate(k, lens, rotary_cos, rotary_sin, rotary_interleaved, advances=True)
        append(k, v, k_cache, v_cache, lens, table)
        lens = lens + k.shape[1]
    options: dict[str, Any] = {
        **window(window_size),
        **causal_alibi(op, alibi_slopes, causal or q_len == 1, window_size),
        "softcap": softcap,
        "scale": softmax_scale,
    }
    if q_len == 1 or (causal and q_len <= MAX_DECODE_ROWS):
        query = q.transpose(1, 2)
        options["token_major_out"] = True
        if block_table is None and cache_batch_idx is None:
            key, value = k_cache[:batch].transpose(1, 2), v_cache[:batch].transpose(1, 2)
            out, lse = torch.ops.fattn.decode(query, key, value, lens, **options)
        else:
            out, lse = torch.ops.fattn.paged_decode(query, k_cache, v_cache, table, lens, **options)
        out = out.transpose(1, 2)
    else:
        starts = torch.arange(batch + 1, device=q.device, dtype=torch.int32) * q_len
        out, lse = torch.ops.fattn.paged_prefill(
            q.flatten(0, 1), k_cache, v_cache, table, lens, starts, q_len, is_causal=causal, **options
        )
        out = out.view(batch, q_len, *out.shape[1:])
        lse = lse.view(-1, batch, q_len).transpose(0, 1)
    return (out, lse) if return_softmax_lse else out


def _lengths(
    op: str, given: int | Tensor | None, appends: bool, batch: int, capacity: int, device: torch.device
) -> Tensor:
    if given is None:
        if appends:
            raise ValueError(
                f"torch_fattn.{op}: k and v are appended at cache_seqlens, which is None; pass it"
            )
        given = capacity
    if isinstance(given, int):
        return torch.full((batch,), given, dtype=torch.int32, device=device)
    return given.to(torch.int32)


def _alibi(slopes: Tensor, q_len: int, kv_len: int) -> Tensor:
    """The bias of all rows and keys: -slope * |i + Lk - Lq - j|."""
    positions = torch.arange(q_len, device=slopes.device)[:, None] + (kv_len - q_len)
    distance = (positions - torch.arange(kv_len, device=slopes.device)).abs()
    return -slopes.float()[..., None, None] * distance
