"""The tables of a rotary embedding, cos and sin, in four kernels, for which the models' own forward launches
nine. A few positions show where both compute the same bits. Forms that change their frequencies as they run
(dynamic, longrope) are left as they are."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..compat import replace_method
from . import running

_WIDEN: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda frequencies: frequencies.expand(2, -1),  # the halves alike
    lambda frequencies: frequencies[:, None].expand(-1, 2),  # the columns of a pair alike
    lambda frequencies: frequencies[None],  # a column per pair
)


class Form(NamedTuple):
    widen: Callable[[Tensor], Tensor]
    is_float: bool  # for any x


_found: dict[type[nn.Module], Form | None] = {}
_undo: list[Callable[[], None]] = []


def fuse(modules: Iterable[nn.Module]) -> None:
    """Replaces the forward of the rotary embeddings among the modules, for all models of the family. The new
    one runs the old one outside of a fused model's forward."""
    for module in modules:
        owner: Any = type(module)
        if "RotaryEmbedding" in owner.__name__ and owner not in _found and (layers := _static(module)):
            form = _found[owner] = _form_of(module, layers[0])
            if form is not None:
                _undo.append(replace_method(owner, "forward", _replacing(owner.forward, form)))


def restore() -> None:
    while _undo:
        _undo.pop()()
    _found.clear()


def _static(module: nn.Module) -> list[str | None]:
    """The types of layers whose frequencies stay as they are."""
    types = getattr(module, "rope_type", "dynamic")
    by_layer: dict[str | None, str] = types if isinstance(types, dict) else {None: types}
    return [layer for layer, kind in by_layer.items() if "dynamic" not in kind and kind != "longrope"]


def _replacing(theirs: Callable[..., Any], form: Form) -> Callable[..., Any]:
    signature = inspect.signature(theirs)

    @functools.wraps(theirs)
    def forward(*arguments: Any, **options: Any) -> Any:
        if running.tables() is not None:
            tables = _tables(form, *signature.bind(*arguments, **options).args)
            if tables is not None:
                return tables
        return theirs(*arguments, **options)

    return forward


@torch.no_grad()
def _tables(
    form: Form, module: Any, x: Tensor, position_ids: Tensor, layer: str | None = None
) -> tuple[Tensor, Tensor] | None:
    """None if they are not of the form."""
    prefix = "" if layer is None else f"{layer}_"
    frequencies = getattr(module, f"{prefix}inv_freq", None)
    scaling = getattr(module, f"{prefix}attention_scaling", None)
    if layer not in _static(module) or not isinstance(scaling, float | int):
        return None
    if position_ids.ndim != 2 or position_ids.is_floating_point():
        return None
    if type(frequencies) is not Tensor or not x.device == position_ids.device == frequencies.device:
        return None
    angles = (position_ids[..., None, None] * form.widen(frequencies.float())).flatten(-2)
    both = angles.new_empty(2, *angles.shape)
    torch.cos(angles, out=both[0])
    torch.sin(angles, out=both[1])
    if scaling != 1:
        both *= scaling
    cos, sin = both if form.is_float else both.to(x.dtype)
    return cos, sin


def _form_of(module: nn.Module, layer: str | None) -> Form | None:
    """The form with which `_tables` returns what the own forward of a copy on the CPU does."""
    probed = copy.copy(module)
    setattr(probed, "attention_scaling" if layer is None else f"{layer}_attention_scaling", 1.25)
    x = torch.empty(2, 5, 1, dtype=torch.bfloat16, device="cpu")
    position_ids = torch.tensor([[0, 1, 2, 3, 1000], [77, 4096, 5, 131071, 9]], device="cpu")
    operands: tuple[Any, ...] = (probed, x, position_ids, layer)[: 3 + (layer is not None)]
    try:
        probed._buffers = {
            name: each if each is None else each.cpu() for name, each in module._buffers.items()
        }
        with torch.no_grad(), torch.device("cpu"):
            found = type(module).forward(*operands)
    except Exception:  # another signature, or code that needs its device
        return None
    for widen, is_float in itertools.product(_WIDEN, (False, True)):
        ours = _tables(Form(widen, is_float), *operands)
        if ours is not None and isinstance(found, tuple) and len(found) == 2:
            if all(a.dtype is b.dtype and torch.equal(a, b) for a, b in zip(found, ours, strict=True)):
                return Form(widen, is_float)
    return None
