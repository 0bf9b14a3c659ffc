"""Finds the ops of a call that wait for the device."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.tensors import tensors_in


class Synchronisations(TorchDispatchMode):
    """Records the ops that wait for the device: they read numbers back, or copy between host and device."""

    WAITS = ("_local_scalar_dense", "nonzero", "equal", "unique", "is_nonzero")

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [tensor for tensor in tensors_in((args, kwargs, result)) if tensor.numel()]
        if len({t.device.type for t in tensors}) > 1 or any(name in func.name() for name in self.WAITS):
            self.ops.append(func.name())
        return result
