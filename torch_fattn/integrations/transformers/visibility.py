"""Decoded masks, and their encoding between the mask function and the attention function.

Models handle masks only as tensors, so a causal pattern is encoded as a tensor: int32, unlike any other mask,
and 4D, which transformers treats as a finished mask. Numbers known to the host are sizes of dimensions;
numbers known only to the device are elements:

    `[B, W, 0, filled]`     the first `filled` keys, without padding
    `[B, W, 1, filled]`     the padding of these keys
    `[rows, W, 2, n + 1]`   where n packed sequences begin and end, none of more than `rows`
    `[B, W, 3, 1]`          how many keys are filled, known to the device
    `[B, W, 3, 1 + Lk]`     the same and the padding of all keys

W is 1, or the window + 1. Padding is stored as the bits of an additive float32 mask, so reading it does not
launch a kernel. Strides are not used: for static caches, later transformers copy masks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Lengths(NamedTuple):
    """The operators' lengths of packed sequences, over the rows of the whole batch."""

    cu_seqlens_q: Tensor  # int32 [n + 1]
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int


@dataclass(frozen=True)
class LayerMask:
    """Which keys the rows of a layer see. Causal rows are aligned to the newest filled key. If nothing is
    hidden, there are no padding, lengths or whole mask."""

    rows: int
    keys: int
    device: torch.device
    filled: int  # number of keys that may be seen
    is_causal: bool = True
    window_left: int | None = -1  # the operators' option; None: a 2D mask leaves it to the layer
    seq_lens: Tensor | None = None  # int32 [B]: number of filled keys, if only the device knows
    padding: Tensor | None = None  # [B, 1, 1, filled], bool or additive
    packed: Lengths | None = None  # causal in each of these sequences
    whole: Tensor | None = None  # [B, H, Lq or 1, Lk], bool or additive, the pattern included

    @property
    def has_pattern(self) -> bool:
        """Whether the mask includes windows and packed sequences. A 2D mask has only padding."""
        return self.window_left is not None

    @property
    def is_only_order(self) -> bool:
        """Whether it hides at most later keys and keys before a window."""
        return self.padding is None and self.packed is None and self.whole is None

    @property
    def real_tokens(self) -> Tensor | None:
        """bool `[B, 1, 1, filled]`; None if there is no padding."""
        if self.padding is None or self.padding.dtype is torch.bool:
            return self.padding
        return self.padding == 0

    def dense(self) -> tuple[Tensor | None, bool]:
        """The 4D mask of sdpa, and whether rows are causal. The mask is None if sdpa's own convention (row i
        sees key i) is equivalent."""
        if self.whole is not None or not self.is_causal:
            return self.whole, False
        if not self.has_pattern and self.padding is None and self.rows in (1, self.keys):
            return None, self.rows > 1
        if self.packed is not None:
            return self._same_sequence(self.packed) & self._causal(self.keys), True
        filled = self.filled if self.seq_lens is None else self.seq_lens[:, None, None, None]
        seen = self._causal(filled)
        real = self.real_tokens
        if real is not None:
            seen = seen & torch.nn.functional.pad(real, (0, self.keys - self.filled))
        return seen, True

    def _causal(self, filled: Tensor | int) -> Tensor:
        seen = causal_mask(self.rows, self.keys, self.device, filled, self.window_left)
        return seen if seen.ndim == 4 else seen[None, None]

    def _same_sequence(self, lengths: Lengths) -> Tensor:
        ends = lengths.cu_seqlens_q[1:].contiguous()
        tokens = torch.arange(int(ends[-1]), device=self.device)
        sequence = torch.searchsorted(ends, tokens, right=True).view(-1, 1, 1, self.keys)
        return sequence.transpose(2, 3) == sequence


def causal_mask(
    rows: int, keys: int, device: torch.device, filled: Tensor | int, window_left: int | None = None
) -> Tensor:
    """bool `[rows, keys]`, or `[B, 1, rows, keys]` for filled `[B, 1, 1, 1]`. The last row sees them all."""
    position = torch.arange(rows, device=device)[:, None] + (filled - rows)
    key = torch.arange(keys, device=device)
    seen = key <= position
    if window_left is not None and window_left >= 0:
        seen = seen & (key >= position - window_left)
    return seen


def read(mask: Tensor, rows: int, keys: int) -> LayerMask | None:
    """Decodes a mask of the attention function; None for the int32 pattern of other lengths."""
    device = mask.device
    if is_pattern(mask):
        return _read_pattern(mask, rows, keys)
    shown = None if hides_nothing(mask) else mask
    if mask.ndim == 2:
        padding = None if shown is None else shown[:, None, None, :]
        return LayerMask(rows, keys, device, keys, window_left=None, padding=padding)
    return LayerMask(rows, keys, device, keys, is_causal=False, whole=shown)


def _read_pattern(mask: Tensor, rows: int, keys: int) -> LayerMask | None:
    longest, window_size, form, elements = mask.shape
    window_left = -1 if window_size == 1 else window_size - 2
    seq_lens = padding = packed = None
    filled = keys
    if is_packed(mask):
        ends = mask[0, 0, 0]
        packed = Lengths(ends, ends, longest, longest)
    elif window_left >= keys:
        return None
    elif form == 3 and elements in (1, 1 + keys):
        seq_lens = mask[:, 0, 0, 0]
        padding = None if elements == 1 else mask[:, :1, :1, 1:].view(torch.float32)
    elif form <= 1 and rows <= elements <= keys:
        filled = elements
        padding = mask[:, :1].view(torch.float32) if form else None
    else:
        return None
    return LayerMask(rows, keys, mask.device, filled, True, window_left, seq_lens, padding, packed)


def is_pattern(mask: Tensor) -> bool:
    return mask.dtype is torch.int32 and mask.ndim == 4


def is_packed(mask: Tensor) -> bool:
    return is_pattern(mask) and mask.shape[2] == 2


def hides_nothing(mask: Tensor) -> bool:
    """Whether this is the expanded True of `nothing_hidden`, without reading device memory. An expanded False
    would hide every key, which models never do."""
    return mask.dtype is torch.bool and not any(mask.stride())


def nothing_hidden(device: torch.device | str, *shape: int) -> Tensor:
    return torch.ones((), dtype=torch.bool, device=device).expand(shape)


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


def write_packed(sequence_ids: Tensor, window: int) -> Tensor | None:
    """Encodes `sequence_ids [B, L]`: consecutive tokens with the same id are one sequence. Waits for the
    device once. None if every token is a sequence, which this form cannot encode."""
    begins = torch.ones_like(sequence_ids, dtype=torch.bool)
    begins[:, 1:] = sequence_ids[:, 1:] != sequence_ids[:, :-1]
    cu_seqlens, longest = lengths_between(begins)
    if cu_seqlens.shape[0] > sequence_ids.shape[1]:  # models may cut a mask to the number of keys
        return None
    return cu_seqlens[None, None, None, :].expand(longest, 1 if window >= longest else window + 1, 2, -1)


def lengths_between(begins: Tensor) -> tuple[Tensor, int]:
    """Cumulative lengths over all rows, and the maximum length, of the sequences that begin where `begins [B,
    L]` is True."""
    first = begins.flatten().nonzero()[:, 0]
    cu_seqlens = torch.cat((first, first.new_full((1,), begins.numel()))).to(torch.int32)
    return cu_seqlens, int(cu_seqlens.diff().max())


def _bits(padding: Tensor, keys: int) -> Tensor:
    padding = torch.nn.functional.pad(padding, (0, keys - padding.shape[-1]))
    hidden = torch.zeros_like(padding, dtype=torch.float32).masked_fill_(~padding, -torch.inf)
    return hidden.view(torch.int32)
