"""Which modules of a model are fused: decided before its first forward with one of this package's attention
implementations, and undone before one with another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedModel

from ..support import FLASH_NAME, NAME, PAGED_NAME
from . import delta_functions, mixers, norms, rotary, running, tables

_OURS = (NAME, FLASH_NAME, PAGED_NAME)


class Fused(NamedTuple):
    """The norms of a model and its layers of linear attention, by name, and the rotary functions of its
    files. A model inside it, such as a vision tower, has its own."""

    norms: tuple[str, ...]
    mixers: tuple[str, ...]
    left: Mapping[str, str]  # of both, those that were not fused, and why
    rotary: Mapping[str, rotary.Form | str] = MappingProxyType({})  # a string says why not


_NOTHING = Fused((), (), MappingProxyType({}))
_MARK = "_fattn_fused"  # in a fused model, so that its copies are known too
_models: WeakKeyDictionary[PreTrainedModel, Fused] = WeakKeyDictionary()
_wanted = False


def want(fuse: bool) -> None:
    """Whether models are fused. Without, the models that were are restored."""
    global _wanted
    _wanted = fuse
    running.enable(fuse)
    if not fuse:
        for model in list(_models):
            _restore(model)
        rotary.restore()
        tables.restore()
        delta_functions.restore()


def prepare(model: PreTrainedModel) -> None:
    """Fuses a model or restores it, if either is due."""
    wanted = _wanted and model.config._attn_implementation in _OURS
    if wanted and model not in _models:
        if not _is_traced():
            _models[model] = _fuse(model)
            vars(model)[_MARK] = True
    elif not wanted and _MARK in vars(model):
        _restore(model)


def runs_fused(model: PreTrainedModel) -> bool:
    return running.is_enabled and model in _models and not _is_traced()


@contextmanager
def forward_of(model: PreTrainedModel) -> Iterator[None]:
    """The context of a forward."""
    prepare(model)
    with running.run(runs_fused(model)):
        yield


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
    layers: list[str] = []
    left: dict[str, str] = {}
    functions: dict[str, rotary.Form | str] = {}
    for path, inner in model.named_modules():
        found = _models.get(inner, _NOTHING) if isinstance(inner, PreTrainedModel) else _NOTHING
        prefix = f"{path}." if path else ""
        fused += (prefix + name for name in found.norms)
        layers += (prefix + name for name in found.mixers)
        left |= {prefix + name: why for name, why in found.left.items()}
        functions |= found.rotary
    return Fused(tuple(fused), tuple(layers), left, functions)


def _fuse(model: PreTrainedModel) -> Fused:
    of_norms = {name: norms.fuse(module) for name, module in _own_norms(model)}
    layers = dict(_own_mixers(model))
    functions = delta_functions.fuse(layers.values())
    of_layers = {name: mixers.fuse(layer, functions) for name, layer in layers.items()}
    left = {name: why for name, why in (of_norms | of_layers).items() if why}
    fused = [tuple(name for name in found if name not in left) for found in (of_norms, of_layers)]
    modules = [module for _name, module in _own_modules(model)]
    tables.fuse(modules)
    return Fused(fused[0], fused[1], left, rotary.fuse(modules))


def _restore(model: PreTrainedModel) -> None:
    for _name, norm in _own_norms(model):
        norms.restore(norm)
    for _name, layer in _own_mixers(model):
        mixers.restore(layer)
    vars(model).pop(_MARK, None)
    _models.pop(model, None)


def _own_norms(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    return ((name, module) for name, module in _own_modules(model) if norms.is_norm(module))


def _own_mixers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    return ((name, module) for name, module in _own_modules(model) if mixers.is_mixer(module))


def _own_modules(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """A model and its modules, without models inside it and theirs."""
    yield prefix.removesuffix("."), module
    for name, child in module.named_children():
        if not isinstance(child, PreTrainedModel):
            yield from _own_modules(child, f"{prefix}{name}.")
