"""Memory that runs out in the middle of a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch.utils._python_dispatch import TorchDispatchMode

_Result = TypeVar("_Result")


class OutOfMemory(TorchDispatchMode):
    """Raises instead of the given op, counted from 0. Ops that need no memory are not counted."""

    WITHOUT = ("aten::fill_", "aten::zero_", "aten::copy_", "aten::arange")  # the last writes to a tensor

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at, self.ops = at, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        needs_none = func.is_view or (func._schema.is_mutable and func.name().startswith(self.WITHOUT))
        if not needs_none:
            self.ops += 1
            if self.ops - 1 == self.at:
                raise MemoryError("no memory") if self.at % 2 else RuntimeError("MPS backend out of memory")
        return func(*args, **(kwargs or {}))


def with_faults(
    call: Callable[[], _Result], check_unchanged: Callable[[], None], ops: range
) -> tuple[_Result, int]:
    """Fails these ops of the call in turn, checks after each, and lets the call pass at last. Returns its
    result, and how often it failed."""
    for failures, at in enumerate(ops):
        with OutOfMemory(at) as fault:
            try:
                result = call()
            except (MemoryError, RuntimeError) as error:
                if fault.ops <= at or "memory" not in str(error):
                    raise
            else:
                assert fault.ops <= at, "the error was swallowed"
                return result, failures
        check_unchanged()
    raise AssertionError("a call of too many ops")
