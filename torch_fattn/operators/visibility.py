"""Which keys a row sees by position, and masks that hide the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

__all__ = ["Visibility", "biased", "limited", "tree_bits", "tree_sees"]

_FAR = 2**62  # beyond every distance; its sum with a position fits an int64

_Position = TypeVar("_Position", int, Tensor)


class Visibility(NamedTuple):
    """The options that hide keys by position."""

    is_causal: bool = True
    window_left: int = -1
    window_right: int = -1
    sink_tokens: int = 0

    @classmethod
    def of(cls, options: Mapping[str, Any], **others: Any) -> Visibility:
        """Those among the options of an operator, and these others."""
        return cls(**{name: options[name] for name in cls._fields if name in options} | others)

    def window(self, row: _Position) -> tuple[_Position, _Position]:
        """The first key in the window of a row at this position, and the one after the last."""
        left = _FAR if self.window_left < 0 else min(self.window_left, _FAR)
        right = _FAR if self.window_right < 0 else min(self.window_right, _FAR)
        return row - left, row + (0 if self.is_causal else right) + 1

    def sinks(self, row: _Position) -> int | _Position:
        """How many sink tokens a row at this position sees."""
        if not self.is_causal:
            return self.sink_tokens
        if isinstance(row, Tensor):
            return (row + 1).clamp(max=self.sink_tokens)
        return min(self.sink_tokens, row + 1)

    def sees(self, row: Tensor, key: Tensor) -> Tensor:
        """Whether rows see keys, bool, of positions that can be broadcast."""
        first, end = self.window(row)
        return ((key >= first) & (key < end)) | (key < self.sinks(row))

    def pairs(self, first: int, rows: int, keys: int) -> int:
        """How many of the first `keys` keys each of the rows from position `first` on sees, all together."""
        sinks = min(self.sink_tokens, keys)
        begin, end = self.window(0)

        def until(distance: int, key: int) -> int:
            """The pairs with a key below this one and less than this distance after the row."""
            low, high = first + distance, first + rows - 1 + distance  # keys of the first and the last row
            low_in, high_in = max(low, 1), min(high, key)
            rising = (low_in + high_in) * (high_in - low_in + 1) // 2 if low_in <= high_in else 0
            return rising + max(high - max(low - 1, key), 0) * key

        def in_window(distance: int) -> int:
            return until(distance, keys) - until(distance, sinks)

        return until(1 if self.is_causal else _FAR, sinks) + in_window(end) - in_window(begin)


def tree_bits(tree_mask: Tensor) -> Tensor:
    """A tree mask as int64 `[Lq]` or `[B, Lq]`: bit t of row i says whether it sees draft token t."""
    if tree_mask.dtype != torch.bool:
        return tree_mask
    return (tree_mask.long() << torch.arange(tree_mask.shape[-1], device=tree_mask.device)).sum(-1)


def tree_sees(tree_mask: Tensor, token: Tensor) -> Tensor:
    """Whether a tree mask leaves keys to rows, bool `[B or 1, Lq, K]`. `token` `[B, K]` counts the keys from
    the first draft token; earlier ones are below 0."""
    bits = tree_bits(tree_mask)[..., None]
    token = token[:, None]
    return (token < 0) | ((bits >> token.clamp(0, bits.shape[-2] - 1)) & 1).bool()


def biased(mask: Tensor | None, bias: Tensor) -> Tensor:
    """The caller's mask, if there is one, as an additive one with this bias."""
    if mask is None:
        return bias
    return bias.where(mask, -torch.inf) if mask.dtype == torch.bool else mask.float() + bias


def limited(mask: Tensor | None, seen: Tensor) -> Tensor:
    """The caller's mask, if there is one, which also hides what is not `seen`."""
    if mask is None:
        return seen
    return mask & seen if mask.dtype == torch.bool else mask.where(seen, -torch.inf)
