"""`Filled`: which layers have the tokens of a sequence. Host numbers only."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet


class Filled:
    """Runs of tokens that some layers lack: the first position of each, and the layers that have it. The set
    of the newest step grows as layers append. A layer that lacks a run lacks all later ones.
    """

    def __init__(self, runs: Sequence[tuple[int, AbstractSet[int]]] = ()) -> None:
        self._runs = [*runs]

    def copy(self) -> Filled:
        return Filled(self._runs)

    def freeze(self, every: AbstractSet[int]) -> None:
        """Ignores, for this sequence, layers that append the newest step later."""
        if not self._runs:
            return
        first, layers = self._runs.pop()
        is_continued = bool(self._runs) and self._runs[-1][1] == layers
        if layers != every and not is_continued:
            self._runs.append((first, frozenset(layers)))

    def add(self, first: int, layers: AbstractSet[int], every: AbstractSet[int]) -> None:
        """Adds new tokens from this position on."""
        self.freeze(every)
        self._runs.append((first, layers))

    def cut(self, length: int) -> None:
        """Drops the tokens from this position on."""
        while self._runs and self._runs[-1][0] >= length:
            self._runs.pop()

    def lacking(self, layers: AbstractSet[int]) -> AbstractSet[int]:
        """The layers that lack a token."""
        return layers - self._runs[-1][1] if self._runs else frozenset()

    def gap(self, layers: AbstractSet[int], length: int) -> tuple[int, int] | None:
        """The first layer that lacks one of the first `length` tokens, and that token's position."""
        gaps = ((first, min(layers - found)) for first, found in self._runs if layers - found)
        position, layer = next(gaps, (length, -1))
        return (layer, position) if position < length else None
