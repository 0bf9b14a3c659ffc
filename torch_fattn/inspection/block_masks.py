"""The work that a block mask leaves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..operators.visibility import Visibility
from .cost import bytes_of

__all__ = ["Blocks", "blocks_of"]


@dataclass(frozen=True)
class Blocks:
    """Pairs are of a row and a key, of all heads and sequences."""

    size: tuple[int, int]
    bytes: int  # of the block mask
    density: float  # visible blocks of all
    pairs: int  # in visible blocks, and visible by position
    tile_pairs: int  # of the steps that tiles of rows visit

    def __str__(self) -> str:
        rows, keys = self.size
        work = f"{self.tile_pairs / max(self.pairs, 1):.2f} times the visible pairs"
        return f"{rows} x {keys}, {self.bytes:,} bytes, {self.density:.1%} visible; tiles visit {work}"


def blocks_of(call: Mapping[str, Any], plan: Mapping[str, Any]) -> Blocks | None:
    """None without a block mask, or if its numbers or those of seq_lens are unknown. On a GPU this waits for
    them."""
    mask, seq_lens = call.get("block_mask"), call.get("seq_lens")
    if mask is None or any(each is not None and each.is_meta for each in (mask, seq_lens)):
        return None
    query, keys, size = call["query"], call["key"].shape[2], tuple(call["block_size"])
    visible = mask.cpu() != 0
    visibility = Visibility.of(call, is_causal=call.get("is_causal", False))
    tile_rows, step = _tile_of(plan)
    pairs = tile_pairs = 0
    for length, shown, sequences in _by_length(visible, seq_lens, query.shape[0], keys):
        offset = call.get("q_offset")
        first_position = length - query.shape[2] if offset is None else offset
        positions = torch.arange(query.shape[2], device="cpu") + first_position
        edges = torch.arange(0, keys + size[1], size[1], device="cpu").clamp(max=length)
        heads = sequences * query.shape[1] // max(shown.shape[1], 1)  # that share a mask
        for first, own in _cut(positions, size[0]):
            seen = _keys_of(visibility, own, own, edges)
            by_position = seen.sum(0) * (len(own) // len(seen))
            pairs += heads * int((by_position * shown[:, :, first // size[0]]).sum())
        for first, own in _cut(positions, tile_rows) if tile_rows else ():
            of_tile = shown[:, :, first // size[0] : (first + len(own) - 1) // size[0] + 1].any(2)
            steps = (_keys_of(visibility, own[:1], own[-1:], edges)[0] + step - 1) // step
            tile_pairs += heads * tile_rows * step * int((steps * of_tile).sum())
    density = visible.double().mean().item() if visible.numel() else 0.0
    return Blocks(size, bytes_of(mask), density, pairs, tile_pairs)


def _by_length(
    visible: Tensor, seq_lens: Tensor | None, batch: int, keys: int
) -> Iterator[tuple[int, Tensor, int]]:
    """Each length with the masks of its sequences, and the number of sequences that share a mask."""
    if seq_lens is None:
        yield keys, visible, batch // max(len(visible), 1)
        return
    lengths = seq_lens.cpu().clamp(0, keys)
    for length, count in zip(*(each.tolist() for each in lengths.unique(return_counts=True)), strict=True):
        yield (length, visible, count) if len(visible) == 1 else (length, visible[lengths == length], 1)


def _tile_of(plan: Mapping[str, Any]) -> tuple[int, int]:
    """The rows of a tile, and the keys of a step."""
    if not plan["passes"]:
        return 0, 1
    first = plan["passes"][0]
    macros = {name: int(value) for name, value in first["macros"].items() if value.isdecimal()}
    groups = macros["FATTN_SIMDGROUPS" if first["kernel"] == "fattn_prefill" else "FATTN_ROW_GROUPS"]
    return groups * macros["FATTN_ROW_FRAGMENTS"] * 8, macros["FATTN_TILE_KEYS"]


def _cut(positions: Tensor, count: int) -> Iterator[tuple[int, Tensor]]:
    return ((first, positions[first : first + count]) for first in range(0, len(positions), count))


def _keys_of(visibility: Visibility, first: Tensor, last: Tensor, edges: Tensor) -> Tensor:
    """The keys between neighbouring edges that rows from `first` to `last` see: `[rows, columns]`, or
    `[1, columns]` for all rows alike."""
    if visibility == Visibility(is_causal=False):
        return edges.diff()[None]
    begin, end = visibility.window(first)[0][:, None], visibility.window(last)[1][:, None]
    sinks = torch.as_tensor(visibility.sinks(last))[..., None]
    low, high = edges[:-1], edges[1:]

    def between(begin: Any, end: Tensor) -> Tensor:
        return (torch.minimum(high, end) - torch.maximum(low, torch.as_tensor(begin))).clamp(min=0)

    return between(begin, end) + between(0, sinks) - between(begin, torch.minimum(end, sinks))
