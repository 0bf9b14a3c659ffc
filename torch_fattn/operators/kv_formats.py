"""The formats of quantised caches: how a row of a key or value is stored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class KvFormat:
    dtype: torch.dtype
    packed: int = 1  # elements of a row per number of the dtype
    group: int = 0  # columns that share a float16 scale and minimum; 0: a row has one float32 scale
    may_lack_scales: bool = False  # every scale is then 1

    def columns(self, dim: int) -> int:
        """The stored numbers of a row of `dim` elements."""
        return dim // self.packed

    def scales(self, rows: Sequence[int], dim: int) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype of the scales of rows of `dim` elements."""
        if self.group:
            return (*rows, dim // self.group, 2), torch.float16
        return tuple(rows), torch.float32


# The same as FATTN_KV_FORMATS in csrc/kernels/common/formats.h.
KV_FORMATS = {
    "int8": KvFormat(torch.int8),
    "fp8_e4m3": KvFormat(torch.uint8, may_lack_scales=True),
    "int4": KvFormat(torch.uint8, packed=2, group=32),
}
INT4_GROUP = KV_FORMATS["int4"].group


def formats_where(is_one: Callable[[KvFormat], bool]) -> str:
    """The quoted names of the formats that satisfy `is_one`: "a", "b" or "c"."""
    *names, last = (f'"{name}"' for name, kind in KV_FORMATS.items() if is_one(kind))
    return f"{', '.join(names)} or {last}" if names else last


def check_format(name: str, kv_format: str, *others: str) -> None:
    """Raises unless it is one of these formats or of the others."""
    known = (*others, *KV_FORMATS)
    if kv_format not in known:
        raise ValueError(f"{name}: kv_format {kv_format!r} is not known; use one of {', '.join(known)}")


def head_dim(columns: int, kv_format: str | None) -> int:
    """The elements of a row of `columns` stored numbers, in a format or unquantised."""
    return columns * (KV_FORMATS[kv_format].packed if kv_format in KV_FORMATS else 1)
