"""Causal patterns, encoded by the mask function in one small tensor for the attention function.

A mask passes through code of the models that handles only tensors, so the pattern is a tensor too: int32,
    unlike any other mask, and 4D, which transformers treats as a finished mask. Numbers known to the host are
    sizes of dimensions; numbers known only to the device are elements:

    `[B, W, 0, filled]`     the first `filled` keys, without padding
    `[B, W, 1, filled]`     the padding of these keys
    `[rows, W, 2, n + 1]`   where n packed sequences begin and end, none of more than `rows`
    `[B, W, 3, 1]`          how many keys are filled, known to the device
    `[B, W, 3, 1 + Lk]`     the same and the padding of all keys

W is 1, or 1 more than the window. The padding is stored as the bits of an additive float32 mask, so that
reading it needs no kernel. Strides carry no information: for static caches, later transformers copy masks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class CausalPattern(NamedTuple):
    window_left: int  # as the operators take it
    keys: int  # number of keys
    seq_lens: Tensor | None  # int32 [B]: how many of these are filled, if only the device knows
    padding: Tensor | None  # additive [B, 1, 1, keys]


class PackedPattern(NamedTuple):
    window_left: int
    cu_seqlens: Tensor  # int32 [n + 1], over the rows of all sequences of the batch
    max_seqlen: int


def write_pattern(
    batch_size: int,
    kv_length: int,
    filled: int | Tensor,
    window: int,
    padding: Tensor | None,
    device: torch.device | str,
) -> Tensor:
    """Encodes a pattern. `padding` is bool `[B, n]`, True = a real token; keys beyond its end are hidden."""
    window_size = 1 if window >= kv_length else window + 1
    if isinstance(filled, Tensor):
        lengths = filled.to(torch.int32).expand(batch_size, 1)
        elements = lengths if padding is None else torch.cat((lengths, _bits(padding, kv_length)), dim=-1)
        return elements[:, None, None, :].expand(-1, window_size, 3, -1)
    if padding is None:
        return torch.empty((batch_size, window_size, 0, filled), dtype=torch.int32, device=device)
    return _bits(padding, filled)[:, None, None, :].expand(-1, window_size, -1, -1)


def is_pattern(mask: Tensor) -> bool:
    return mask.dtype is torch.int32 and mask.ndim == 4


def write_packed(sequence_ids: Tensor, window: int) -> Tensor | None:
    """Encodes `sequence_ids [B, L]`: consecutive tokens with the same id are one sequence. Finding their ends
    costs one wait for the device. None if every token is a sequence, which this form cannot encode."""
    begins = torch.ones_like(sequence_ids, dtype=torch.bool)
    begins[:, 1:] = sequence_ids[:, 1:] != sequence_ids[:, :-1]
    cu_seqlens, longest = lengths_between(begins)
    if cu_seqlens.shape[0] > sequence_ids.shape[1]:  # models may cut a mask to the number of keys
        return None
    return cu_seqlens[None, None, None, :].expand(longest, 1 if window >= longest else window + 1, 2, -1)


def lengths_between(begins: Tensor) -> tuple[Tensor, int]:
    """Cumulative lengths over all rows, and the longest length, of the sequences that begin where `begins [B,
    L]` is True."""
    first = begins.flatten().nonzero()[:, 0]
    cu_seqlens = torch.cat((first, first.new_full((1,), begins.numel()))).to(torch.int32)
    return cu_seqlens, int(cu_seqlens.diff().max())


def is_packed(mask: Tensor) -> bool:
    return is_pattern(mask) and mask.shape[2] == 2


def read_packed(mask: Tensor) -> PackedPattern:
    longest, window_size, _, _ = mask.shape
    return PackedPattern(_window_left(window_size), mask[0, 0, 0], longest)


def _window_left(window_size: int) -> int:
    return -1 if window_size == 1 else window_size - 2


def read_pattern(mask: Tensor, q_length: int, kv_length: int) -> CausalPattern | None:
    """Decodes a pattern; None if the mask does not have the size of a pattern for these lengths."""
    _batch, window_size, rows, elements = mask.shape
    window_left = _window_left(window_size)
    if window_left >= kv_length:
        return None
    if rows == 3 and elements in (1, 1 + kv_length):
        padding = None if elements == 1 else mask[:, :1, :1, 1:].view(torch.float32)
        return CausalPattern(window_left, kv_length, mask[:, 0, 0, 0], padding)
    if rows <= 1 and q_length <= elements <= kv_length:
        return CausalPattern(window_left, elements, None, mask[:, :1].view(torch.float32) if rows else None)
    return None


def _bits(padding: Tensor, keys: int) -> Tensor:
    padding = torch.nn.functional.pad(padding, (0, keys - padding.shape[-1]))
    hidden = torch.zeros_like(padding, dtype=torch.float32).masked_fill_(~padding, -torch.inf)
    return hidden.view(torch.int32)
