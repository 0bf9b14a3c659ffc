"""Decode of a batch whose sequences begin with the same keys. One call attends to the prefix, reading it once
for the whole batch; a second attends to each sequence's own keys; a merge combines them. Hydragen (Juravsky
et al. 2024) and the cascade inference of FlashInfer (Ye et al. 2025) do the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from ..runtime.signatures import is_checked, public
from ..runtime.tensor_checks import check_device, check_integers, check_shape
from .attention import paged_decode
from .kv_formats import head_dim
from .options import DecodeOptions, StorageOptions
from .parts import token_major
from .prefix_and_suffix import Keys, Rows, attend_both
from .return_lse import with_lse

__all__ = ["shared_prefix_decode", "shared_prefix_paged_decode"]

STORAGE = tuple(StorageOptions.__annotations__)
QUERY = ("B", "Hq", "Lq", "D")
OF_DECODE = {"key_cache": "key", "value_cache": "value"}  # names of `paged_decode` for the suffix
POOL = ("num_blocks", "block_size", "Hkv")


@with_lse
@public("torch_fattn.shared_prefix_decode", options="decode", names=OF_DECODE)
def shared_prefix_decode(
    query: Tensor,
    prefix_key: Tensor,
    prefix_value: Tensor,
    key: Tensor,
    value: Tensor,
    seq_lens: Tensor | None = None,
    *,
    block_tables: Tensor | None = None,
    prefix_key_scales: Tensor | None = None,
    prefix_value_scales: Tensor | None = None,
    prefix_kv_format: str = "auto",
    return_lse: bool = False,
    **options: Unpack[DecodeOptions],
) -> Tensor | tuple[Tensor, Tensor]:
    """`decode` of sequences with a common prefix, which is stored and read once, and separate suffixes.

    Args:
        query: `[B, Hq, Lq, D]`, Lq as in `decode`. Row i of sequence b is the token at position
            `P + seq_lens[b] - Lq + i`.
        prefix_key, prefix_value: `[1, Hkv, P, D]` and `[1, Hkv, P, Dv]`, the keys 0 to P - 1 of every
            sequence; any strides, of the dtype of query or quantised.
        key, value: the keys from P on, `[B, Hkv, capacity, D]` and `[B, Hkv, capacity, Dv]`; with
            block_tables pools as in `paged_decode`.
        seq_lens: int32 `[B]` on the device of query: the number of filled keys of each suffix. Default: all;
            required with block_tables.
        block_tables: int32 `[B, max_blocks]`, the blocks of each suffix.
        prefix_key_scales, prefix_value_scales, prefix_kv_format: `key_scales`, `value_scales` and `kv_format`
            of the prefix, whose format may differ from the suffix's.
        options: those of `decode` over keys 0 to `P + capacity - 1`: an attn_mask is broadcastable to
            `[B, Hq, Lq, P + capacity]`, windows and sink_tokens reach into the prefix, a sink counts once.

    Returns:
        As `decode`: out `[B, Hq, Lq, Dv]`, and with `return_lse` also lse `[B, Hq, Lq]`. With several rows,
        token_major_out copies.

    Raises:
        ValueError: prefix_key or prefix_value has a batch size other than 1; others as in `decode`.

    The newest Lq tokens must be in the suffix; without a tree_mask, the oldest may be the last token of the
    prefix. So seq_lens is at least Lq with a tree_mask and Lq - 1 without. With shorter suffixes, rows would
    see later keys of the prefix; with FATTN_CHECK=1 in the environment they raise ValueError.

    A key-value head has `B * Hq / Hkv * Lq` rows. The prefix is read once per 32 of them, or with thousands
    of rows once per prefill tile; `decode` would read it B times. An attn_mask that differs between rows, or
    a window that begins in the prefix, is expanded to every row and key of the prefix. The number of rows
    determines how sums are split: unlike in `decode`, the last bits of a result may depend on the batch.
    """
    name = "torch_fattn.shared_prefix_decode"
    check_shape(name, "query", query, QUERY)
    cache = ("B", "Hkv", "capacity") if block_tables is None else POOL
    check_shape(name, "key", key, (*cache, "D"))
    check_shape(name, "value", value, (*cache, "Dv"))
    if block_tables is not None:
        check_shape(name, "block_tables", block_tables, ("B", "max_blocks"))
        if seq_lens is None:
            raise ValueError(
                f"{name}: block_tables came without seq_lens; pass the length of every suffix, int32 [B]"
            )
    if seq_lens is not None:
        check_integers(name, "seq_lens", seq_lens, query.shape[:1], query)
    kv_heads = key.shape[1 if block_tables is None else 2]
    rest, stored = _apart(options)
    capacity = key.shape[2] if block_tables is None else block_tables.shape[1] * key.shape[1]
    suffix = Keys(key, value, capacity, seq_lens, block_tables, stored)
    _refuse_heads(query, kv_heads, suffix)
    check_shape(name, "prefix_key", prefix_key, (1, kv_heads, "P", "D"))
    check_shape(name, "prefix_value", prefix_value, (1, kv_heads, prefix_key.shape[2], "Dv"))
    for what, prefix_part in (("prefix_key", prefix_key), ("prefix_value", prefix_value)):
        check_device(name, what, prefix_part, query)
    value_dims = _value_dim(prefix_value, prefix_kv_format), _value_dim(value, options.get("kv_format"))
    if value_dims[0] != value_dims[1]:
        raise ValueError(
            f"{name}: prefix_value has head_dim {value_dims[0]} and value {value_dims[1]}; they must be equal"
        )
    prefix = Keys(
        prefix_key,
        prefix_value,
        prefix_key.shape[2],
        stored={
            "key_scales": prefix_key_scales,
            "value_scales": prefix_value_scales,
            "kv_format": prefix_kv_format,
        },
        is_separate_prefix=True,
    )
    if seq_lens is not None and prefix.length > 0:
        _check_lengths(name, seq_lens, _least_own(query, options))
    token_major_out = rest.pop("token_major_out", False)
    out, lse = attend_both(name, Rows(query, kv_heads), prefix, suffix, None, rest)
    if token_major_out:
        out = token_major(out)
    return (out, lse) if return_lse else out


@with_lse
@public("torch_fattn.shared_prefix_paged_decode", options="decode")
def shared_prefix_paged_decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    shared_blocks: int,
    *,
    return_lse: bool = False,
    **options: Unpack[DecodeOptions],
) -> Tensor | tuple[Tensor, Tensor]:
    """`paged_decode` of sequences whose first blocks are the same and are read once.

    Args:
        query, key_cache, value_cache, block_tables, seq_lens, options: as in `paged_decode`.
        shared_blocks: the number of leading entries that all rows of block_tables share. These blocks are
            full, and their keys are not after a sequence's first query row: `seq_lens[b]` is at least
            `shared_blocks * block_size + Lq - 1`, one more with a tree_mask, or 0 for a sequence that sees
            nothing. With FATTN_CHECK=1 in the environment, other lengths and different tables raise
            ValueError.

    Returns:
        As `paged_decode`.

    `PagedKVCache.decode(..., shared_prefix=True)` finds the number itself. Rounding and reads are as in
    `shared_prefix_decode`.
    """
    name = "torch_fattn.shared_prefix_paged_decode"
    check_shape(name, "query", query, QUERY)
    check_shape(name, "key_cache", key_cache, (*POOL, "D"))
    check_integers(name, "block_tables", block_tables, (query.shape[0], "max_blocks"), query)
    check_integers(name, "seq_lens", seq_lens, query.shape[:1], query)
    rest, stored = _apart(options)
    most = block_tables.shape[1]
    every = Keys(key_cache, value_cache, most * key_cache.shape[1], seq_lens, block_tables, stored)
    _refuse_heads(query, key_cache.shape[2], every)
    if not 0 <= shared_blocks <= most:
        raise ValueError(
            f"{name}: shared_blocks {shared_blocks} is not from 0 to {most}, the columns of block_tables; "
            "pass how many leading blocks all sequences share"
        )
    if shared_blocks == 0 or query.shape[0] == 0:
        return paged_decode(
            query, key_cache, value_cache, block_tables, seq_lens, return_lse=return_lse, **options
        )
    block_size = key_cache.shape[1]
    length = shared_blocks * block_size
    _check_lengths(name, seq_lens, length + _least_own(query, options), or_zero=True)
    _check_shared(name, block_tables[:, :shared_blocks], seq_lens)
    # A sequence that sees nothing may lack the blocks.
    has_prefix = (seq_lens > 0).int()
    prefix = Keys(
        key_cache,
        value_cache,
        length,
        has_prefix.amax(0, keepdim=True) * length,
        block_tables[:, :shared_blocks].index_select(0, has_prefix.argmax().view(1)),
        stored,
    )
    suffix = Keys(
        key_cache,
        value_cache,
        (most - shared_blocks) * block_size,
        (seq_lens - length).clamp(min=0),
        block_tables[:, shared_blocks:],
        stored,
    )
    token_major_out = rest.pop("token_major_out", False)
    out, lse = attend_both(name, Rows(query, key_cache.shape[2]), prefix, suffix, seq_lens <= 0, rest)
    if token_major_out:
        out = token_major(out)
    return (out, lse) if return_lse else out


def _apart(options: DecodeOptions) -> tuple[DecodeOptions, dict[str, Any]]:
    """Separates score and result options from storage options."""
    rest: Any = dict(options)
    return rest, {name: rest.pop(name) for name in STORAGE if name in rest}


def _least_own(query: Tensor, options: DecodeOptions) -> int:
    """The minimum length of a suffix. With a tree_mask, it has the keys of all rows."""
    return query.shape[2] - (options.get("tree_mask") is None)


def _value_dim(stored: Tensor, kv_format: str | None) -> int:
    return head_dim(stored.shape[3], kv_format if stored.dtype == torch.uint8 else None)


def _refuse_heads(query: Tensor, kv_heads: int, keys: Keys) -> None:
    """Raises the operator's error if query heads cannot share the key-value heads."""
    if query.shape[1] % max(kv_heads, 1) != 0:
        keys.decode(query)


def _check_lengths(name: str, seq_lens: Tensor, least: int, *, or_zero: bool = False) -> None:
    if not is_checked(seq_lens):
        return
    for b, length in enumerate(seq_lens.flatten().tolist()):
        if length < least and not (or_zero and length == 0):
            raise ValueError(
                f"{name}: seq_lens[{b}] is {length} and must be at least {least}, so that no query row lies "
                "within the prefix; share fewer keys"
            )


def _check_shared(name: str, blocks: Tensor, seq_lens: Tensor) -> None:
    if not is_checked(seq_lens):
        return
    used = [(b, blocks[b].tolist()) for b, length in enumerate(seq_lens.flatten().tolist()) if length > 0]
    for b, table in used:
        if table != used[0][1]:
            raise ValueError(
                f"{name}: sequences {used[0][0]} and {b} do not have the same first {len(table)} blocks; "
                "pass as shared_blocks how many they share"
            )
