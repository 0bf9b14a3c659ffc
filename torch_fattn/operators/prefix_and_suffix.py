"""The two parts of `torch_fattn.shared_prefix_decode`: the prefix of all sequences, and the suffix of each.

Over the prefix, the rows of all sequences are heads that share a key-value head: `decode` packs 32 of them
into a threadgroup and fills the GPU even with few. Many rows run on the prefills, whose tiles hold more. An
attn_mask or window that differs between rows becomes a mask.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..runtime.options import with_defaults
from .options import DecodeOptions, PointwiseOptions
from .parts import merge_parts, result_dtype, shifted, without_keys
from .visibility import Visibility, masked

# From this many rows on, over all key-value heads, the prefills have a threadgroup of 32 or 64 rows for every
# core of most GPUs. Below it, decode, which splits the keys, reads more but has more parallelism.
PREFILL_ROWS = 2048
# Rows of a key-value head in a decode threadgroup: up to this many read the prefix once either way.
DECODE_ROWS = 32
# With wider heads, a threadgroup of prefill has no more rows than one of decode.
PREFILL_HEAD_DIM = 128
# Options that apply to a part of the keys unchanged, and those that `attend_both` adapts. Others are refused.
POINTWISE = frozenset(PointwiseOptions.__annotations__)
FITTED = {"attn_mask", "tree_mask", "window_left", "window_right", "sink_tokens", "sinks", "alibi_slopes"}
# Arguments of `decode`, by their names in its errors.
_OF_KEYS = re.compile(r"\b(?<!-)(?:(?:key|value)(?:_scales)?|kv_format)\b(?!-)")


@dataclass
class Keys:
    """A part of the keys, at most `length` per sequence: dense, or in the blocks of a pool."""

    key: Tensor
    value: Tensor
    length: int
    seq_lens: Tensor | None = None
    block_tables: Tensor | None = None
    stored: dict[str, Any] = field(default_factory=dict)  # scales and format
    is_separate_prefix: bool = False  # arguments are named prefix_key etc.

    def decode(self, query: Tensor, *, part: bool = True, **options: Any) -> tuple[Tensor, Tensor]:
        """Returns out and sums for `merge_parts`; without `part`, out and lse."""
        options |= self.stored
        try:
            return self._decode(query, part, options)
        except (NotImplementedError, TypeError, ValueError) as refusal:
            if not self.is_separate_prefix:
                raise
            raise type(refusal)(_OF_KEYS.sub(r"prefix_\g<0>", str(refusal))) from None

    def _decode(self, query: Tensor, part: bool, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
        op = torch.ops.fattn.decode if self.block_tables is None else torch.ops.fattn.paged_decode
        tables = () if self.block_tables is None else (self.block_tables,)
        attend = op.part if part else op
        out, lse = attend(query, self.key, self.value, *tables, self.seq_lens, **options)
        return out, lse


@dataclass
class Rows:
    """The query rows of all sequences, and their layout as heads `[1, Hkv * B * group * Lq, 1, *]`."""

    query: Tensor  # [B, Hq, Lq, D]
    kv_heads: int

    @property
    def sharing(self) -> int:
        """The number of rows that share a key-value head."""
        batch, heads, q_len, _ = self.query.shape
        return batch * (heads // self.kv_heads) * q_len

    def as_heads(self, x: Tensor) -> Tensor:
        """A tensor, broadcastable to `[B, Hq, Lq, *]`, in the layout of heads."""
        columns = x.shape[-1]
        x = x.expand(*self.query.shape[:3], columns)
        return x.unflatten(1, (self.kv_heads, -1)).transpose(0, 1).reshape(1, -1, 1, columns)

    def from_heads(self, x: Tensor) -> Tensor:
        """Undoes `as_heads`: `[B, Hq, Lq, *]`."""
        batch, heads, q_len, _ = self.query.shape
        shape = (self.kv_heads, batch, heads // self.kv_heads, q_len, x.shape[-1])
        return x.reshape(shape).transpose(0, 1).flatten(1, 2)

    def prefill(self, keys: Keys, **options: Any) -> tuple[Tensor, Tensor]:
        """Every row sees every key."""
        batch, heads, q_len, head_dim = self.query.shape
        if keys.block_tables is None:
            rows = self.as_heads(self.query).view(1, self.kv_heads, -1, head_dim)
            out, sums = torch.ops.fattn.prefill.part(rows, keys.key, keys.value, **options)
            return self.from_heads(out), self.from_heads(sums)
        packed = self.query.transpose(1, 2).reshape(batch * q_len, heads, head_dim)
        total = packed.shape[0]
        starts = torch.arange(2, dtype=torch.int32, device=packed.device) * total
        out, sums = torch.ops.fattn.paged_prefill.part(
            packed,
            keys.key,
            keys.value,
            keys.block_tables,
            keys.seq_lens,
            starts,
            total,
            is_causal=False,
            **options,
        )
        out = out.unflatten(0, (batch, q_len)).transpose(1, 2)
        return out, sums.unflatten(1, (batch, q_len)).transpose(0, 1)


def attend_both(
    name: str,
    rows: Rows,
    prefix: Keys,
    suffix: Keys,
    is_empty: Tensor | None,
    options: DecodeOptions,
) -> tuple[Tensor, Tensor]:
    """Attention over both parts. `options`: the score options. Masks sequences without the prefix, `is_empty`
    `[B]`."""
    for unfit in options.keys() - POINTWISE - FITTED:
        raise NotImplementedError(
            f"{name}: {unfit} is not implemented for shared prefixes; pass the whole keys of each sequence "
            "to torch_fattn.decode"
        )
    every = with_defaults("decode", options)
    attn_mask, alibi_slopes = every["attn_mask"], every["alibi_slopes"]
    window_left, sink_tokens = every["window_left"], every["sink_tokens"]
    pointwise: dict[str, Any] = {each: value for each, value in options.items() if each in POINTWISE}
    keys = prefix.length + suffix.length
    whole = (*rows.query.shape[:3], keys)
    if attn_mask is not None and not _is_broadcastable(attn_mask, whole):
        raise ValueError(
            f"{name}: attn_mask of shape {list(attn_mask.shape)} cannot be broadcast over {keys} keys, to "
            f"{list(whole)}; its last dimension counts those of the prefix and of the capacity behind it"
        )
    own: dict[str, Any] = {**options, "attn_mask": _columns(attn_mask, prefix.length, None)}
    if sink_tokens > 0:
        own["sink_tokens"] = max(sink_tokens - prefix.length, 0)
    if prefix.length == 0 or rows.query.shape[:3].numel() == 0:
        return suffix.decode(rows.query, part=False, **own)
    own_out, own_sums = suffix.decode(rows.query, **own)

    mask = _columns(attn_mask, 0, prefix.length)
    if 0 <= window_left < keys - 1:
        row = _beyond_prefix(rows, suffix)[..., None] + (prefix.length - 1)
        key = torch.arange(prefix.length, device=row.device)
        mask = masked(mask, Visibility(False, window_left, -1, sink_tokens).mask(row, key))
    if mask is not None and mask.shape[0] > 1 and is_empty is not None:
        # Rows of an empty sequence would see keys that other rows do not, which may be NaN.
        mask = masked(mask, ~is_empty[:, None, None, None])
    head_dim = max(rows.query.shape[-1], prefix.value.shape[-1])
    if (
        rows.sharing > DECODE_ROWS
        and rows.sharing * rows.kv_heads >= PREFILL_ROWS
        and head_dim <= PREFILL_HEAD_DIM
        and prefix.key.dtype == rows.query.dtype
        and mask is None
        and alibi_slopes is None
    ):
        out, sums = rows.prefill(prefix, **pointwise)
    else:
        if mask is not None and mask.shape[:-1].numel() > 1:
            mask = rows.as_heads(mask)
        slopes = None
        if alibi_slopes is not None:
            slopes = rows.as_heads(alibi_slopes[..., None, None]).flatten()
        out, sums = prefix.decode(
            rows.as_heads(rows.query),
            attn_mask=mask,
            window_left=window_left,
            sink_tokens=sink_tokens,
            alibi_slopes=slopes,
            **pointwise,
        )
        out, sums = rows.from_heads(out), rows.from_heads(sums)
    if alibi_slopes is not None:
        # decode aligned all rows to the last token of the prefix, so all scores of a row have the same
        # offset.
        distance = alibi_slopes.float()[..., None] * _beyond_prefix(rows, suffix)
        sums = shifted(sums, distance)
    if is_empty is not None:
        sums = without_keys(sums, is_empty[:, None, None, None])
    return merge_parts((out, own_out), (sums, own_sums), result_dtype(rows.query))


def _beyond_prefix(rows: Rows, suffix: Keys) -> Tensor:
    """How far each row is from the last key of the prefix, `[B or 1, 1, Lq]`."""
    q_len = rows.query.shape[2]
    row = torch.arange(1 - q_len, 1, device=rows.query.device)
    if suffix.seq_lens is None:
        return (suffix.length + row)[None, None]
    return suffix.seq_lens.clamp(0, suffix.length)[:, None, None] + row


def _is_broadcastable(mask: Tensor, shape: tuple[int, ...]) -> bool:
    sizes = zip(reversed(mask.shape), reversed(shape), strict=False)
    return mask.dim() <= len(shape) and all(size in (1, full) for size, full in sizes)


def _columns(mask: Tensor | None, first: int, end: int | None) -> Tensor | None:
    """The 4D mask of a part of the keys."""
    if mask is None:
        return None
    mask = mask[(None,) * (4 - mask.dim())]
    return mask if mask.shape[-1] == 1 else mask[..., first:end]
