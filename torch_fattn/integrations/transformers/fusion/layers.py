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
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from ..compat import replace_method
from . import running
from .deferred import pending, plain

_STEP = 256  # tokens by which a buffer grows
_ROOM = "_fattn_room"  # the attribute of a layer
_STEP_OF_HEADS, _MAX_HEAD_DIM = 4, 576  # of fattn::rotary_write

Update = Callable[..., tuple[Tensor, Tensor]]


def replace_updates() -> Iterator[Callable[[], None]]:
    """Yields functions that undo it."""
    owner: Any
    for owner in (DynamicLayer, DynamicSlidingWindowLayer):
        yield replace_method(owner, "update", _growing(owner.update))
    for owner in (StaticLayer, StaticSlidingWindowLayer):
        yield replace_method(owner, "update", _static(owner.update))


class Room:
    """A layer's buffers `[B, H, capacity, D]`, filled up to the token `end`. `newest` are the keys and values
    that `update` left in the layer. If the layer has others, it is a copy, or was cropped or reordered, and
    rows behind its own may be someone else's: it moves to a room of its own."""

    __slots__ = ("end", "keys", "newest", "values")

    def __init__(self, key: Tensor, value: Tensor, tokens: int) -> None:
        capacity = -(-(tokens + 1) // _STEP) * _STEP
        self.keys, self.values = (
            new.new_empty((*new.shape[:2], capacity, new.shape[3])) for new in (key, value)
        )
        self.end = 0
        self.newest: tuple[Tensor, Tensor] | None = None

    def __reduce__(self) -> Any:
        return type(None), ()  # copied and unpickled layers make their own

    def view(self, begin: int, end: int) -> tuple[Tensor, Tensor]:
        return self.keys[:, :, begin:end], self.values[:, :, begin:end]

    def takes(self, layer: DynamicLayer, tokens: int) -> bool:
        if self.newest is None or self.end + tokens > self.keys.shape[2]:
            return False
        if self.keys.is_inference() and not torch.is_inference_mode_enabled():
            return False  # torch refuses writes to such a tensor
        return self.newest[0] is layer.keys and self.newest[1] is layer.values


def _growing(theirs: Update) -> Update:
    @functools.wraps(theirs)
    def update(
        layer: Any, key_states: Tensor, value_states: Tensor, *arguments: Any, **options: Any
    ) -> tuple[Tensor, Tensor]:
        if torch.compiler.is_compiling() or running.now() is None:
            return theirs(layer, key_states, value_states, *arguments, **options)
        if not layer.is_initialized:
            layer.lazy_initialization(key_states, value_states)
        value_states = plain(value_states)
        if not _fits(layer, key_states, value_states, is_empty=layer.keys.numel() == 0):
            return theirs(layer, key_states, value_states, *arguments, **options)
        new = key_states.shape[2]
        seen = kept = _append(layer, key_states, value_states)
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.cumulative_length += new
            before = layer.sliding_window - 1
            if layer.record_past:
                seen = seen[0][:, :, -before - new :], seen[1][:, :, -before - new :]
            else:
                kept = seen[0][:, :, -before:], seen[1][:, :, -before:]
        layer.keys, layer.values = vars(layer)[_ROOM].newest = kept
        return seen

    return update


def _append(layer: Any, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """The layer's keys and values with the new ones, views of its room."""
    length, new = (layer.keys.shape[2] if layer.keys.numel() else 0), key.shape[2]
    room = vars(layer).get(_ROOM)
    if room is None or not room.takes(layer, new):
        room = vars(layer)[_ROOM] = Room(key, value, length + new)
        if length:
            for to, old in zip(room.view(0, length), (layer.keys, layer.values), strict=True):
                to.copy_(old)
        room.end = length
    rotation = pending(key)
    if rotation is not None:
        rotation.store(value, room.keys, room.values, start=room.end)
    else:
        for to, rows in zip(room.view(room.end, room.end + new), (key, value), strict=True):
            to.copy_(rows)
    room.end += new
    return room.view(room.end - length - new, room.end)


def _static(theirs: Update) -> Update:
    @functools.wraps(theirs)
    def update(
        layer: Any, key_states: Tensor, value_states: Tensor, *arguments: Any, **options: Any
    ) -> tuple[Tensor, Tensor]:
        rotation = None if torch.compiler.is_compiling() else pending(key_states)
        if rotation is not None and not layer.is_initialized:
            layer.lazy_initialization(key_states, value_states)
        if rotation is None or not _fits(layer, key_states, value_states, is_empty=False):
            return theirs(layer, key_states, value_states, *arguments, **options)
        new = key_states.shape[2]
        if isinstance(layer, StaticSlidingWindowLayer):
            if layer.cumulative_length_int + new > layer.max_cache_len:  # the window moves
                return theirs(layer, key_states, value_states, *arguments, **options)
            layer.cumulative_length_int += new
        rotation.store(value_states, layer.keys, layer.values, starts=layer.cumulative_length)
        layer.cumulative_length.add_(new)
        return layer.keys, layer.values

    return update


def _fits(layer: Any, key: Tensor, value: Tensor, is_empty: bool) -> bool:
    """Whether key and value are rows of the layer's buffers that a kernel can write."""
    if key.ndim != 4 or type(value) is not Tensor or key.shape[:3] != value.shape[:3]:
        return False
    if torch.is_grad_enabled() and (key.requires_grad or value.requires_grad or layer.keys.requires_grad):
        return False
    if pending(key) is not None and (value.dtype != key.dtype or not is_head_dim(value.shape[3])):
        return False
    return is_empty or all(
        type(old) is Tensor
        and old.ndim == 4
        and (old.dtype, old.device, old.shape[:2], old.shape[3])
        == (new.dtype, new.device, new.shape[:2], new.shape[3])
        for old, new in ((layer.keys, key), (layer.values, value))
    )


def is_head_dim(columns: int) -> bool:
    return columns % _STEP_OF_HEADS == 0 and 0 < columns <= _MAX_HEAD_DIM
