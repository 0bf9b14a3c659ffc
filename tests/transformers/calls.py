"""One recorded call of an attention operator."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor


class Call(NamedTuple):
    op: str
    arguments: dict[str, Any]

    def __getitem__(self, name: Any) -> Any:
        return self.arguments[name]

    @property
    def keys(self) -> int:
        return int(self["key"].shape[2])

    @property
    def has_dense_mask(self) -> bool:
        """A row of padding `[B, 1, 1, Lk]` does not count, because neither a window nor a length can replace
        it. The packed operators take no mask."""
        mask: Tensor | None = self.arguments.get("attn_mask")
        return mask is not None and mask.shape[1:3] != (1, 1)
