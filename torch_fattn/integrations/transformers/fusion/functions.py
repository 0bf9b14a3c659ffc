"""Functions of model files, replaced in their file for all models of a family. The new one runs the old one
outside of a fused model's forward, and for calls that the operator does not take."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

from torch import nn

from ..compat import replace_method

Form = TypeVar("Form")


class Functions(Generic[Form]):
    """Those with a name. `form_of` tells which form of its operator a function has, or why it has none, and
    `replacing` returns the new function."""

    def __init__(
        self,
        name: str,
        form_of: Callable[[Callable[..., Any]], Form | str],
        replacing: Callable[[Callable[..., Any], Form], Callable[..., Any]],
    ) -> None:
        self._name, self._form_of, self._replacing = re.compile(name), form_of, replacing
        self._found: dict[tuple[str, str], Form | str] = {}  # by file and function
        self._undo: list[Callable[[], None]] = []

    def fuse(self, modules: Iterable[nn.Module]) -> dict[str, Form | str]:
        """Replaces the functions of the files that modules come from. Returns what is known of each."""
        found = {}
        for file in {type(module).__module__ for module in modules}:
            for name, function in list(vars(sys.modules[file]).items()):
                if not self._name.match(name) or not callable(function):
                    continue
                if (file, name) not in self._found:
                    form = self._found[file, name] = self._form_of(function)
                    if not isinstance(form, str):
                        ours = self._replacing(function, form)
                        self._undo.append(replace_method(sys.modules[file], name, ours))
                found[f"{file.rpartition('.')[2]}.{name}"] = self._found[file, name]
        return found

    def restore(self) -> None:
        while self._undo:
            self._undo.pop()()
        self._found.clear()
