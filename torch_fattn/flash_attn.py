"""The functions of flash-attn 2.8 under their names, with its layouts, argument order and defaults:

    from torch_fattn.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

Tensors are `[batch, length, heads, head_dim]`, packed ones `[total, heads, head_dim]`; causal is that of the
lower right corner; a row that sees no key is 0, and its log-sum-exp -inf. alibi_slopes, `[H]` or `[B, H]`,
add `-slope * |i + Lk - Lq - j|` to the score of row i and key j. Head sizes that are no multiple of 8 are
padded on every call. There is no backward and no dropout. `deterministic` and `num_splits` change nothing:
results are always the same from run to run. Lengths, block tables and indices stay on the device; with
FATTN_CHECK=1 in the environment those out of range raise ValueError before anything is written.
"""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from ._flash_attn_arguments import (
    ROWS,
    check_between,
    check_blocks,
    check_heads,
    check_integers,
    check_operands,
    check_shape,
    check_sizes,
    check_slopes,
    refuse_dropout,
    scale_of,
    softcap_of,
    window,
)
from ._flash_attn_cache import append, rotate, without_padding_on_the_left
from ._flash_attn_cache_arguments import check_new_keys, lengths, table_of
from ._flash_attn_options import Result, Window, attend_by_distance, result, sees_no_later_key
from ._flash_attn_varlen import (
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from ._head_padding import pad_heads, without_padding
from ._operands import public
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

_PACKED_QKV = "[batch, length, 3, heads, head_dim]"
_PACKED_KV = "[batch, length, 2, kv_heads, head_dim]"
_DENSE_CACHE = "[batch_of_cache, capacity, kv_heads, head_dim]"
_POOL = "[num_blocks, block_size, kv_heads, head_dim]"


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
@public("torch_fattn.flash_attn_func")
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
    return _dense(
        "flash_attn_func", q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        return_attn_probs,
    )  # fmt: skip


def _dense(
    op: str, q: Tensor, k: Tensor, v: Tensor, dropout_p: float, softmax_scale: float | None, causal: bool,
    window_size: Window, softcap: float, alibi_slopes: Tensor | None, return_attn_probs: bool,
) -> Result:  # fmt: skip
    check_shape(op, "q", q, ROWS)
    check_operands(op, q, k=(k, ROWS), v=(v, ROWS))
    check_sizes(op, "batch size", q=q.shape[0], k=k.shape[0], v=v.shape[0])
    check_sizes(op, "length", k=k.shape[1], v=v.shape[1])
    check_heads(op, q, k, v, softcap=softcap, alibi_slopes=alibi_slopes)
    check_slopes(op, alibi_slopes, q, q.shape[0])
    refuse_dropout(op, dropout_p)
    scale = scale_of(op, softmax_scale)
    q_len, kv_len, value_dim = q.shape[1], k.shape[1], v.shape[-1]
    limits = {**window(window_size), "softcap": softcap_of(op, softcap, scale)}
    if alibi_slopes is None and not return_attn_probs and is_plain(limits):
        routed = torchs(*(tensor.transpose(1, 2) for tensor in (q, k, v)), is_causal=causal, scale=scale)
        if routed is not None:
            return routed.transpose(1, 2).contiguous()
    options: dict[str, Any] = {**limits, "token_major_out": True}
    q, k, v, options["scale"] = pad_heads(q, k, v, scale)
    operands = [tensor.transpose(1, 2) for tensor in (q, k, v)]

    def attend(before: int, **options: Any) -> tuple[Tensor, Tensor]:
        out, lse = torch.ops.fattn.prefill(*operands, q_offset=kv_len - q_len - before, **options)
        return out.transpose(1, 2), lse

    if q_len == 1 or (causal and q_len <= MAX_DECODE_ROWS):
        out, lse = torch.ops.fattn.decode(*operands, alibi_slopes=alibi_slopes, **options)
        out = out.transpose(1, 2)
    elif alibi_slopes is None or sees_no_later_key(causal, options):
        out, lse = attend(0, is_causal=causal, alibi_slopes=alibi_slopes, **options)
    else:
        out, lse = attend_by_distance(attend, alibi_slopes, alibi_slopes[..., None], options)
    return result(without_padding(out, value_dim), lse, return_attn_probs)


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
@public("torch_fattn.flash_attn_qkvpacked_func", names=dict.fromkeys("qkv", "qkv"))
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
    op = "flash_attn_qkvpacked_func"
    check_shape(op, "qkv", qkv, _PACKED_QKV)
    q, k, v = qkv.unbind(2)
    return _dense(
        op, q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs
    )


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
@public("torch_fattn.flash_attn_kvpacked_func", names=dict.fromkeys("kv", "kv"))
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
    op = "flash_attn_kvpacked_func"
    check_shape(op, "kv", kv, _PACKED_KV)
    k, v = kv.unbind(2)
    return _dense(
        op, q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs
    )


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
@public("torch_fattn.flash_attn_with_kvcache")
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
    or with a block_table `[B, blocks]` pools of blocks of any size. The keys of a sequence are those from
    cache_leftpad `[B]` on, if that is given. Returns out like q, and the log-sum-exp `[B, Hq, Lq]` if asked
    for.

    A length on the device that is negative or above the capacity is clamped, and a key that has no place in
    the cache is dropped; an int that leaves no room for k raises ValueError. rotary_cos and rotary_sin have
    at least as many positions as the cache has room for; a query row behind those is NaN.
    """
    op = "flash_attn_with_kvcache"
    check_shape(op, "q", q, ROWS)
    cache_shape = _DENSE_CACHE if block_table is None else _POOL
    check_operands(op, q, k_cache=(k_cache, cache_shape), v_cache=(v_cache, cache_shape))
    caches = {"k_cache": k_cache, "v_cache": v_cache}
    for dim, what in enumerate(
        ("batch size", "capacity") if block_table is None else ("num_blocks", "block_size")
    ):
        check_sizes(op, what, **{name: cache.shape[dim] for name, cache in caches.items()})
    check_heads(op, q, k_cache, v_cache, *caches, softcap=softcap, alibi_slopes=alibi_slopes)
    check_slopes(op, alibi_slopes, q, q.shape[0])
    scale = scale_of(op, softmax_scale)
    batch, q_len = q.shape[:2]
    value_dim = v_cache.shape[-1]
    options: dict[str, Any] = {**window(window_size), "softcap": softcap_of(op, softcap, scale)}
    table = table_of(op, q, k_cache, cache_batch_idx, block_table)
    capacity = table.shape[1] * k_cache.shape[1]
    check_new_keys(op, q, k, v, k_cache, v_cache, rotary_cos, rotary_sin, capacity)
    lens = lengths(op, cache_seqlens, q, k, capacity)
    if cache_leftpad is not None:
        check_integers(op, "cache_leftpad", cache_leftpad, f"[{batch}]", q, or_int64=True)
        check_between(op, "cache_leftpad", cache_leftpad, lens)
    new = 0 if k is None else k.shape[1]
    table_name = "cache_batch_idx" if block_table is None else "block_table"
    check_blocks(op, table_name, table, lens, new, k_cache)

    if capacity == 0:  # no place for a key, and none to see
        out = q.new_zeros(*q.shape[:-1], value_dim)
        lse = q.new_full((batch, q.shape[2], q_len), -torch.inf, dtype=torch.float32)
        return (out, lse) if return_softmax_lse else out

    if k is not None and v is not None:
        lens = lens.clamp(0, capacity)
        if rotary_cos is not None and rotary_sin is not None:
            # Rows that see the same keys are all at the position of the first.
            by_position = causal or max(options["window_left"], options["window_right"]) >= 0
            last = rotary_cos.shape[0] - (q_len if by_position else 1)
            check_between(op, "cache_seqlens", lens, last)
            q = rotate(q, lens, rotary_cos, rotary_sin, rotary_interleaved, advances=by_position)
            k = rotate(k, lens, rotary_cos, rotary_sin, rotary_interleaved, advances=True)
    q, key_cache, value_cache, options["scale"] = pad_heads(q, k_cache, v_cache, scale)
    if k is not None and v is not None:
        k, _, v, _ = pad_heads(k, k, v, None)
        append(k, v, key_cache, value_cache, lens, table)
        for cache, padded in ((k_cache, key_cache), (v_cache, value_cache)):
            if padded is not cache:
                cache.copy_(padded[..., : cache.shape[-1]])
        lens = lens + new

    if q_len == 1 or (causal and q_len <= MAX_DECODE_ROWS):
        query = q.transpose(1, 2)
        options |= {"alibi_slopes": alibi_slopes, "token_major_out": True}
        if cache_leftpad is not None:
            position = torch.arange(capacity, device=q.device)
            options["attn_mask"] = (position >= cache_leftpad[:, None])[:, None, None]
        if block_table is None and cache_batch_idx is None:
            key, value = (cache[:batch].transpose(1, 2) for cache in (key_cache, value_cache))
            out, lse = torch.ops.fattn.decode(query, key, value, lens, **options)
        else:
            out, lse = torch.ops.fattn.paged_decode(query, key_cache, value_cache, table, lens, **options)
        out = out.transpose(1, 2)
    else:
        if cache_leftpad is not None:
            first = cache_leftpad.clamp(0, capacity).to(torch.int32)
            key_cache, value_cache, table = without_padding_on_the_left(key_cache, value_cache, table, first)
            lens = (lens.clamp(max=capacity) - first).clamp(min=0)
        starts = torch.arange(batch + 1, device=q.device, dtype=torch.int32) * q_len

        def attend(before: int, **options: Any) -> tuple[Tensor, Tensor]:
            keys = (lens.clamp(max=capacity) - before).clamp(min=0) if before else lens
            out, lse = torch.ops.fattn.paged_prefill(
                q.flatten(0, 1), key_cache, value_cache, table, keys, starts, q_len, **options
            )
            return out.unflatten(0, (batch, q_len)), lse.unflatten(1, (batch, q_len)).transpose(0, 1)

        if alibi_slopes is None or sees_no_later_key(causal, options):
            out, lse = attend(0, is_causal=causal, alibi_slopes=alibi_slopes, **options)
        else:
            out, lse = attend_by_distance(attend, alibi_slopes, alibi_slopes[..., None], options)
    out = without_padding(out, value_dim)
    return (out, lse) if return_softmax_lse else out
