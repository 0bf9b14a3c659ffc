"""Which modules of a model are fused: decided before its first forward with one of this package's attention
implementations, and undone before one with another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedModel

from ..support import FLASH_NAME, NAME, PAGED_NAME
from . import norms

_OURS = (NAME, FLASH_NAME, PAGED_NAME)


class Fused(NamedTuple):
    """The modules of a model, by name. A model inside it, such as a vision tower, has its own."""

    fused: tuple[str, ...]
    left: Mapping[str, str]  # and why they were not fused


_NOTHING = Fused((), MappingProxyType({}))
_MARK = "_fattn_fused"  # in a fused model, so that its copies are known too
_models: WeakKeyDictionary[PreTrainedModel, Fused] = WeakKeyDictionary()
_wanted = False


def want(fuse: bool) -> None:
    """Whether models are fused. Without, the models that were are restored."""
    global _wanted
    _wanted = fuse
    norms.enable(fuse)
    if not fuse:
        for model in list(_models):
            _restore(model)


def prepare(model: PreTrainedModel) -> None:
    """Fuses a model or restores it, if either is due."""
    wanted = _wanted and model.config._attn_implementation in _OURS
    if wanted and model not in _models:
        if not _is_traced():
            _models[model] = _fuse(model)
            vars(model)[_MARK] = True
    elif not wanted and _MARK in vars(model):
        _restore(model)


def prepare_all(model: PreTrainedModel) -> None:
    """Prepares a model and the models inside it, whether or not a forward of the model calls them."""
    for inner in model.modules():
        if isinstance(inner, PreTrainedModel):
            prepare(inner)


def _is_traced() -> bool:
    """Whether random numbers cannot show now what a module computes."""
    in_transform: bool = torch._C._functorch.peek_interpreter_stack() is not None
    return in_transform or torch.jit.is_tracing() or torch._guards.detect_fake_mode() is not None


def fused_in(model: PreTrainedModel) -> Fused:
    """All that was fused in a model and in the models inside it."""
    fused: list[str] = []
    left: dict[str, str] = {}
    for path, inner in model.named_modules():
        found = _models.get(inner, _NOTHING) if isinstance(inner, PreTrainedModel) else _NOTHING
        prefix = f"{path}." if path else ""
        fused += (prefix + name for name in found.fused)
        left |= {prefix + name: why for name, why in found.left.items()}
    return Fused(tuple(fused), left)


def _fuse(model: PreTrainedModel) -> Fused:
    why = {name: norms.fuse(module) for name, module in _own_norms(model)}
    return Fused(tuple(name for name in why if not why[name]), {name: why[name] for name in why if why[name]})


def _restore(model: PreTrainedModel) -> None:
    for _name, norm in _own_norms(model):
        norms.restore(norm)
    vars(model).pop(_MARK, None)
    _models.pop(model, None)


def _own_norms(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The norms of a model, without those of models inside it."""
    for name, child in module.named_children():
        if isinstance(child, PreTrainedModel):
            continue
        if norms.is_norm(child):
            yield prefix + name, child
        yield from _own_norms(child, f"{prefix}{name}.")
