"""The layers of transformers' caches inside a fused model.

A dynamic layer concatenates all its keys with the new ones in each step. Here they lie in a buffer with
room for more tokens, `layer.keys` is a view of it, and a step writes one row. A static layer has its buffer
already. Where the key waits for its rotation, both store it in the rotation's launch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import cache_utils

from ..compat import replace_method
from . import running
from .deferred import is_head_dim, plain, waiting

_STEP = 256  # tokens by which a buffer grows
_ROOM = "_fattn_room"  # attributes of a layer
_FILLED = "_fattn_filled"  # how many tokens a static layer has, if it was not reset
_Rows = tuple[Tensor, Tensor]  # keys and values


def replace_updates() -> Iterator[Callable[[], None]]:
    """Replaces `update` of layers. Yields functions that undo it."""
    owner: Any
    for owner in (cache_utils.DynamicLayer, cache_utils.DynamicSlidingWindowLayer):
        yield replace_method(owner, "update", _first(_grow, owner.update))
    for owner in (cache_utils.StaticLayer, cache_utils.StaticSlidingWindowLayer):
        yield replace_method(owner, "update", _first(_fill, owner.update))


def _first(ours: Callable[[Any, Tensor, Tensor], _Rows | None], theirs: Callable[..., _Rows]) -> Any:
    """An `update` that tries ours in a fused model."""

    @functools.wraps(theirs)
    def update(layer: Any, key_states: Any, value_states: Any, *arguments: Any, **options: Any) -> _Rows:
        if running.tables() is not None:
            value_states = plain(value_states)
            if not layer.is_initialized:
                layer.lazy_initialization(key_states, value_states)
            if _fits(layer, key_states, value_states):
                found = ours(layer, key_states, value_states)
                if found is not None:
                    return found
        return theirs(layer, key_states, value_states, *arguments, **options)

    return update


def _fits(layer: Any, key: Tensor, value: Tensor) -> bool:
    """Whether key and value are rows like those of the layer."""
    if key.ndim != 4 or key.shape[:3] != value.shape[:3]:
        return False
    if torch.is_grad_enabled():
        return False  # a backward may need the keys of an earlier step, even where none requires a gradient
    return layer.keys.numel() == 0 or (_are_alike(layer.keys, key) and _are_alike(layer.values, value))


def _are_alike(old: Tensor, new: Tensor) -> bool:
    if type(old) is not Tensor or old.dtype is not new.dtype or old.device != new.device:
        return False
    return old.shape[:2] == new.shape[:2] and old.shape[3:] == new.shape[3:]


def _is_stored(key: Tensor, value: Tensor, keys: Tensor, values: Tensor, **where: Any) -> bool:
    """Stores both in the launch of the rotation that the key waits for, if it does."""
    rotation = waiting(key) if value.dtype is key.dtype and is_head_dim(value.shape[3]) else None
    if rotation is not None:
        caches = {"key_cache": keys.transpose(1, 2), "value_cache": values.transpose(1, 2)}
        rotation.store(torch.ops.fattn.rotary_write, value, **caches, **where)
    return rotation is not None


class _Room:
    """A layer's buffers `[B, H, capacity, D]`, filled up to the token `end`. `newest` are the keys and values
    that `update` left in the layer. If the layer has others, it is a copy, or was cropped or reordered, and
    rows behind its own may be someone else's: it moves to a room of its own."""

    def __init__(self, key: Tensor, value: Tensor, tokens: int) -> None:
        capacity = -(-(tokens + 1) // _STEP) * _STEP
        self.buffers = [
            torch.empty(*new.shape[:2], capacity, new.shape[3], dtype=new.dtype, device=new.device)
            for new in (key, value)  # a deferred key still waits
        ]
        self.end = 0
        self.newest: tuple[Any, Any] = (None, None)

    def __reduce__(self) -> Any:
        return type(None), ()  # copied and unpickled layers make their own

    def rows(self, begin: int, end: int) -> _Rows:
        keys, values = self.buffers
        return keys[:, :, begin:end], values[:, :, begin:end]

    def takes(self, layer: Any, tokens: int) -> bool:
        if self.end + tokens > self.buffers[0].shape[2]:
            return False
        if self.buffers[0].is_inference() and not torch.is_inference_mode_enabled():
            return False  # torch refuses to write to it
        return self.newest[0] is layer.keys and self.newest[1] is layer.values


def _grow(layer: Any, key: Tensor, value: Tensor) -> _Rows:
    length, new = layer.keys.shape[2] if layer.keys.numel() else 0, key.shape[2]
    room: _Room | None = vars(layer).get(_ROOM)
    if room is None or not room.takes(layer, new):
        room = vars(layer)[_ROOM] = _Room(key, value, length + new)
        room.end = length
        if length:
            _copy(room.rows(0, length), (layer.keys, layer.values))
    if not _is_stored(key, value, *room.buffers, start=room.end):
        _copy(room.rows(room.end, room.end + new), (key, value))
    room.end += new
    seen = kept = room.rows(room.end - length - new, room.end)
    if isinstance(layer, cache_utils.DynamicSlidingWindowLayer):
        layer.cumulative_length += new
        before = layer.sliding_window - 1
        if layer.record_past:
            seen = seen[0][:, :, -before - new :], seen[1][:, :, -before - new :]
        else:
            kept = seen[0][:, :, -before:], seen[1][:, :, -before:]
    layer.keys, layer.values = room.newest = kept
    return seen


def _copy(to: _Rows, rows: _Rows) -> None:
    for each, new in zip(to, rows, strict=True):
        each.copy_(new)


def _fill(layer: Any, key: Tensor, value: Tensor) -> _Rows | None:
    """None if the window moves, the layer is full, or the key does not wait."""
    new, has_window = key.shape[2], isinstance(layer, cache_utils.StaticSlidingWindowLayer)
    if has_window and layer.cumulative_length_int + new > layer.max_cache_len:
        return None
    filled = vars(layer).get(_FILLED, 0) + new
    if filled > layer.max_cache_len:  # or the layer was reset
        filled = layer.cumulative_length.item() + new
        if filled > layer.max_cache_len:
            return None
    if not _is_stored(key, value, layer.keys, layer.values, starts=layer.cumulative_length):
        return None
    layer.cumulative_length.add_(new)
    vars(layer)[_FILLED] = filled
    if has_window:
        layer.cumulative_length_int += new
    return layer.keys, layer.values
