"""Which keys a row sees by position, and masks that hide the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

__all__ = ["Visibility", "biased", "expanded_blocks", "masked", "tree_bits", "tree_visible"]

_FAR = 2**62  # exceeds any distance; its sum with a position fits an int64

_Position = TypeVar("_Position", int, Tensor)


class Visibility(NamedTuple):
    """The options that hide keys by position."""

    is_causal: bool = True
    window_left: int = -1
    window_right: int = -1
    sink_tokens: int = 0

    @classmethod
    def of(cls, options: Mapping[str, Any], **others: Any) -> Visibility:
        """Selects them from an operator's options, plus `others`."""
        return cls(**{name: options[name] for name in cls._fields if name in options} | others)

    def window(self, row: _Position) -> tuple[_Position, _Position]:
        """The first and past-the-end key in the window of a row at this position."""
        left = _FAR if self.window_left < 0 else min(self.window_left, _FAR)
        right = _FAR if self.window_right < 0 else min(self.window_right, _FAR)
        return row - left, row + (0 if self.is_causal else right) + 1

    def sinks(self, row: _Position) -> int | _Position:
        """The number of sink tokens that a row at this position sees."""
        if not self.is_causal:
            return self.sink_tokens
        if isinstance(row, Tensor):
            return (row + 1).clamp(max=self.sink_tokens)
        return min(self.sink_tokens, row + 1)

    def mask(self, row: Tensor, key: Tensor) -> Tensor:
        """Whether rows see keys, bool. Positions broadcast."""
        first, end = self.window(row)
        return ((key >= first) & (key < end)) | (key < self.sinks(row))

    def pairs(self, first: int, rows: int, keys: int) -> int:
        """The number of visible pairs of `rows` rows from position `first` on and the first `keys` keys."""
        sinks = min(self.sink_tokens, keys)
        begin, end = self.window(0)

        def until(distance: int, key: int) -> int:
            """The pairs with a key below `key` and less than `distance` after the row."""
            low, high = first + distance, first + rows - 1 + distance  # keys of the first and the last row
            low_in, high_in = max(low, 1), min(high, key)
            rising = (low_in + high_in) * (high_in - low_in + 1) // 2 if low_in <= high_in else 0
            return rising + max(high - max(low - 1, key), 0) * key

        def in_window(distance: int) -> int:
            return until(distance, keys) - until(distance, sinks)

        return until(1 if self.is_causal else _FAR, sinks) + in_window(end) - in_window(begin)


def tree_bits(tree_mask: Tensor) -> Tensor:
    """A tree mask as int64 `[Lq]` or `[B, Lq]`: bit t of row i is set if it sees draft token t."""
    if tree_mask.dtype != torch.bool:
        return tree_mask
    return (tree_mask.long() << torch.arange(tree_mask.shape[-1], device=tree_mask.device)).sum(-1)


def tree_visible(tree_mask: Tensor, token: Tensor) -> Tensor:
    """Whether a tree mask lets rows see keys, bool `[B or 1, Lq, K]`. `token` `[B, K]` is the index of each
    key from the first draft token; earlier keys are below 0."""
    bits = tree_bits(tree_mask)[..., None]
    token = token[:, None]
    return (token < 0) | ((bits >> token.clamp(0, bits.shape[-2] - 1)) & 1).bool()


def expanded_blocks(block_mask: Tensor, block_size: Sequence[int], rows: int, keys: int) -> Tensor:
    """A block mask as a bool mask of these rows and keys."""
    visible = block_mask.bool().repeat_interleave(block_size[0], -2)[..., :rows, :]
    return visible.repeat_interleave(block_size[1], -1)[..., :keys]


def biased(mask: Tensor | None, bias: Tensor) -> Tensor:
    """Adds a bias to the caller's mask, if there is one."""
    if mask is None:
        return bias
    return bias.where(mask, -torch.inf) if mask.dtype == torch.bool else mask.float() + bias


def masked(mask: Tensor | None, visible: Tensor) -> Tensor:
    """Hides keys that are not `visible` in the caller's mask, if there is one."""
    if mask is None:
        return visible
    return mask & visible if mask.dtype == torch.bool else mask.where(visible, -torch.inf)
