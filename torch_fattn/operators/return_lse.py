"""The types of functions whose `return_lse` decides what they return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Concatenate, Literal, ParamSpec, Protocol, cast, overload

from torch import Tensor

__all__ = ["method_with_lse", "with_lse"]

_Arguments = ParamSpec("_Arguments")
_Both = tuple[Tensor, Tensor]


class WithLse(Protocol[_Arguments]):
    """Since a ParamSpec cannot add a keyword, type checkers check the arguments of calls without return_lse,
    and the results of all. The first match decides, so the overlaps are harmless."""

    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, *args: Any, return_lse: Literal[True], **options: Any
    ) -> _Both: ...
    @overload
    def __call__(self, *args: Any, return_lse: Literal[False], **options: Any) -> Tensor: ...
    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, *args: Any, return_lse: bool, **options: Any
    ) -> Tensor | _Both: ...
    @overload
    def __call__(self, *args: _Arguments.args, **options: _Arguments.kwargs) -> Tensor: ...


def with_lse(function: Callable[_Arguments, Tensor | _Both]) -> WithLse[_Arguments]:
    return cast("WithLse[_Arguments]", function)


class MethodWithLse(Protocol[_Arguments]):
    def __get__(self, instance: Any, owner: Any = None, /) -> WithLse[_Arguments]: ...


def method_with_lse(
    method: Callable[Concatenate[Any, _Arguments], Tensor | _Both],
) -> MethodWithLse[_Arguments]:
    return cast("MethodWithLse[_Arguments]", method)
