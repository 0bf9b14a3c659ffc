"""Counts the kernels that a forward launches, by part of the model.

An operator counts as one kernel if it writes memory of the model's device. Views, allocations and reads of a
number do not count. `linear`, `rms_norm` and `scaled_dot_product_attention` count as one, as on mps, even
where torch composes them of other operators. Operators of this package count the kernels that they launched.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from . import running
from .deferred import Deferred

_ONE_KERNEL = {torch.rms_norm, F.rms_norm, F.linear, torch._C._nn.linear, F.scaled_dot_product_attention}
_NO_KERNEL = re.compile(
    r"aten::(detach|alias|empty|new_empty|lift_fresh|_reshape_alias|_unsafe_view|set_|resize_|equal$|nonzero"
    r"|_local_scalar_dense|is_nonzero)"
)
_PARTS = (  # the first that matches a module's path in a layer and its class
    ("head norms", r"(?i)(attn|attention)\..*norm"),
    ("projections", r"(?i)(attn|attention)\..*(Linear|Conv1D)"),
    ("linear attention", r"^linear_attn|Delta|TextLinearAttention"),
    ("norms", r"(?i)norm"),
    ("rotary embedding, cache and attention", r"(?i)(attn|attention)"),
    ("MLP", r"(?i)(mlp|feed_forward|experts|moe)"),
)
OTHER, BESIDES = "residuals and others", "besides the layers"


class Launches:
    """Numbers of kernels by part. `layers` is the number of layers that ran, which their sum is about."""

    def __init__(self, model: nn.Module) -> None:
        self.parts: Counter[str] = Counter()
        self.layers = 0
        self._model = model
        self._device = next(model.parameters()).device.type
        self._inside = [BESIDES]
        self._muted = False

    @contextmanager
    def count(self) -> Iterator[None]:
        hooks = []
        for name, module in self._model.named_modules():
            if part := self._part(name, module):
                hooks.append(module.register_forward_pre_hook(self._enter(part)))
                hooks.append(module.register_forward_hook(self._leave, always_call=True))
        try:
            with ExitStack() as modes:
                modes.enter_context(running.counted())
                modes.enter_context(_OneKernel(self))
                modes.enter_context(_Operators(self))
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def _part(self, name: str, module: nn.Module) -> str:
        """The part that a module begins; empty if it belongs to that around it."""
        in_layer = re.search(r"(?:^|\.)(?:layers|h|blocks|block|layer)\.\d+(?:\.(.*))?$", name)
        if in_layer is None:
            return ""
        if in_layer[1] is None:
            return OTHER
        path = f"{in_layer[1]}:{type(module).__name__}"
        return next((part for part, pattern in _PARTS if re.search(pattern, path)), "")

    def _enter(self, part: str) -> Callable[..., None]:
        def enter(*_arguments: Any) -> None:
            self._inside.append(part)
            self.layers += part == OTHER

        return enter

    def _leave(self, *_arguments: Any) -> None:
        self._inside.pop()

    def add(self, kernels: int = 1) -> None:
        if not self._muted:
            self.parts[self._inside[-1]] += kernels

    def run_as_one(self, function: Callable[..., Any], arguments: Any, options: Any) -> Any:
        self.add()
        before, self._muted = self._muted, True
        try:
            return function(*arguments, **options)
        finally:
            self._muted = before

    def run(self, operator: Any, arguments: Any, options: Any) -> Any:
        is_ours = operator.namespace == "fattn"
        before = _launched() if is_ours else 0
        result = operator(*arguments, **options)
        if is_ours:
            self.add(_launched() - before if self._device == "mps" else 1)
        elif not _NO_KERNEL.match(operator.name()) and not _is_view(operator):
            tensors = [leaf for leaf in tree_leaves((arguments, options, result)) if isinstance(leaf, Tensor)]
            if any(tensor.device.type == self._device for tensor in tensors):
                self.add()
        return result


def _launched() -> int:
    return sum(torch.ops.fattn._launch_counts().values())


def _is_view(operator: Any) -> bool:
    returns = operator._schema.returns
    return bool(returns) and all(each.alias_info and not each.alias_info.is_write for each in returns)


class _OneKernel(TorchFunctionMode):
    def __init__(self, launches: Launches) -> None:
        super().__init__()
        self._launches = launches

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in _ONE_KERNEL:
            return self._launches.run_as_one(function, args, kwargs or {})
        return function(*args, **(kwargs or {}))


class _Operators(TorchDispatchMode):
    def __init__(self, launches: Launches) -> None:
        super().__init__()
        self._launches = launches

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, Deferred) for each in types):
            return NotImplemented  # it computes the tensor first, in this mode
        return self._launches.run(operator, args, kwargs or {})
