"""The results of flash-attn's functions, and their types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, ParamSpec, Protocol, cast, overload

from torch import Tensor

_Arguments = ParamSpec("_Arguments")
_Both = tuple[Tensor, Tensor]  # out and lse
_Three = tuple[Tensor, Tensor, Tensor]  # and an empty tensor, as flash-attn returns without dropout
Result = Tensor | _Both | _Three


class WithLse(Protocol[_Arguments]):
    """As `operators/return_lse.py`: type checkers check the arguments of calls without these keywords."""

    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, *args: Any, return_softmax_lse: Literal[True], **options: Any
    ) -> _Both: ...
    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, *args: Any, return_attn_probs: Literal[True], **options: Any
    ) -> _Three: ...
    @overload
    def __call__(self, *args: Any, return_softmax_lse: Literal[False], **options: Any) -> Tensor: ...
    @overload
    def __call__(self, *args: Any, return_attn_probs: Literal[False], **options: Any) -> Tensor: ...
    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, *args: Any, return_softmax_lse: bool, **options: Any
    ) -> Tensor | _Both: ...
    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, *args: Any, return_attn_probs: bool, **options: Any
    ) -> Tensor | _Three: ...
    @overload
    def __call__(self, *args: _Arguments.args, **options: _Arguments.kwargs) -> Tensor: ...


def with_lse(function: Callable[_Arguments, Result]) -> WithLse[_Arguments]:
    return cast("WithLse[_Arguments]", function)


def result(out: Tensor, lse: Tensor, return_attn_probs: bool, return_softmax_lse: bool = False) -> Result:
    if return_softmax_lse:
        return out, lse
    return (out, lse, out.new_empty(0)) if return_attn_probs else out
