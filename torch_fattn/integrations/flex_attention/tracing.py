"""Traces a `mask_mod` or `score_mod`: runs it once on the host with symbols in place of tensors.

Every call traces again, so a trace reflects the current values of numbers that the function reads and
branches on. Tensors are operands, whose contents do not affect the trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import inf
from numbers import Integral, Number, Real
from operator import getitem
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask
from torch.overrides import TorchFunctionMode

INDICES = ("b", "h", "q_idx", "kv_idx")
_MAX_SIZE = 250  # of an expression; larger ones are not traced
_ELEMENTS_AT_A_TIME = 2**24
_CONSTANTS = (Number, str, type(None), type(...), torch.dtype, torch.device, torch.layout)
_FILLS = {"tensor": 0, "scalar_tensor": 0, "full": 1, "full_like": 1}  # index of the value argument
_SIGNS = {"add": (1, 1), "radd": (1, 1), "sub": (1, -1), "rsub": (-1, 1)}

# The terms of a sum with their factors, and the bool conditions, with their required values, outside of which
# it is -inf.
Sum = tuple[dict[Any, Any], list[tuple[Any, bool]]]


class Expression:
    """A symbol, or a torch function applied to expressions, tensors and constants. Expressions with equal
    repr and no `reads` are equal."""

    def __init__(self, function: Callable[..., Any] | None, arguments: tuple[Any, ...], keywords: Any = None):
        self.function, self.arguments, self.keywords = function, arguments, keywords or {}
        self.name: str = arguments[0] if function is None else function.__name__.strip("_")
        # new_ones and new_zeros, in and_masks and or_masks, do not depend on their first argument's value.
        is_new = self.name in ("new_ones", "new_zeros")
        leaves = list(_leaves((arguments[is_new:], self.keywords)))
        parts = [leaf for leaf in leaves if isinstance(leaf, Expression)]
        self.symbols: frozenset[Any] = symbols_of(*(parts if function else arguments))
        # Other operands may change between calls.
        self.reads = [leaf for leaf in leaves if not isinstance(leaf, (Expression, *_CONSTANTS))]
        self.reads += (read for part in parts for read in part.reads)
        module = getattr(function, "__module__", None) or "torch"
        if module.startswith("torch._ops") or not module.startswith(("torch", "_operator")):
            self.reads.append(function)  # it may have state
        self.size: int = 1 + sum(part.size for part in parts)
        if self.size > _MAX_SIZE:
            raise ValueError("the function is too long to be traced")

    def __repr__(self) -> str:
        return f"{id(self.function)}{self.arguments}{self.keywords}"


class _Traced(Tensor):
    """A tensor without data: only the trace can compute with it."""

    expression: Expression

    @classmethod
    def of(cls, expression: Expression) -> _Traced:
        traced = torch.empty((), device="meta").as_subclass(cls)
        traced.expression = expression
        return traced


class _Tracing(TorchFunctionMode):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), keywords: Any = None
    ) -> Any:
        name, keywords = getattr(function, "__name__", ""), keywords or {}
        traced = [leaf for leaf in _leaves((arguments, keywords)) if isinstance(leaf, _Traced)]
        if not traced and name not in _FILLS:
            return function(*arguments, **keywords)
        if name == "__get__":
            attribute, of = function.__self__.__name__, traced[0].expression
            if attribute == "device":
                return self.device
            if attribute == "dtype" and of.function is None:
                return torch.float32 if of.name == "score" else torch.int64
        is_operator = name.startswith("__") and name not in ("__get__", "__set__", "__setitem__")
        is_in_place = name.startswith("__i") and hasattr(Tensor, f"__r{name[3:]}")
        if "out" in keywords or is_in_place or (name.endswith("_") and not is_operator):
            raise RuntimeError(f"a traced function cannot call {name}")
        return _Traced.of(Expression(function, _expressions(arguments), _expressions(keywords)))


def trace(mod: Callable[..., Any], names: tuple[str, ...], device: torch.device) -> Expression | None:
    """The expression that `mod` computes from symbols with these names; None if it needs real tensors."""
    symbols = [_Traced.of(Expression(None, (name,))) for name in names]
    try:
        with _Tracing(device):
            found: Expression = mod(*symbols).expression
    except Exception:  # the evaluation with tensors raises the user's own errors
        return None
    return None if any(isinstance(each, Tensor) and each.is_meta for each in found.reads) else found


def evaluate(value: Any, known: dict[str, Tensor]) -> Any:
    """The value of an expression, where `known` has the values of its symbols."""
    if not isinstance(value, Expression):
        return _mapped(value, lambda part: evaluate(part, known))
    if value.function is None:
        return known[value.name]
    function = getitem if value.name == "getitem" else value.function  # of a tensor or a tuple
    return function(*evaluate(value.arguments, known), **evaluate(value.keywords, known))


def everywhere(
    function: Callable[[dict[str, Tensor]], Tensor],
    symbols: frozenset[str],
    shape: tuple[int, int, int, int],
    device: torch.device,
) -> Tensor:
    """Evaluates a function of indices on `[B, H, Lq, Lk]`; a dimension whose index it does not read has size
    1."""
    score = torch.zeros((), dtype=torch.float32, device=device)  # new_ones and new_zeros use its dtype
    b, h, rows, keys = (n if name in symbols else 1 for name, n in zip(INDICES, shape, strict=True))

    def part(row: Tensor) -> Tensor:
        def at(b: Tensor, h: Tensor, i: Tensor, k: Tensor) -> Tensor:
            return function(dict(zip(INDICES, (b, h, row[i], k), strict=True), score=score))

        return create_mask(at, b, h, len(row), keys, device=device)  # returns what the function returns

    at_a_time = max(1, _ELEMENTS_AT_A_TIME // (b * h * keys))
    return torch.cat([part(row) for row in torch.arange(rows, device=device).split(at_a_time)], 2)


def symbols_of(*values: Any) -> frozenset[Any]:
    """The names of the symbols in expressions; other values are included as they are."""
    named = (value.symbols if isinstance(value, Expression) else {value} for value in values)
    return frozenset().union(*named)


def number_of(value: Any) -> Any:
    """The value of a number, or of a one-element host tensor; else None."""
    if isinstance(value, Expression) and value.name in _FILLS and len(value.arguments) > _FILLS[value.name]:
        number = number_of(value.arguments[_FILLS[value.name]])
        return number if number in (inf, -inf) else None  # other values depend on the dtype
    if isinstance(value, Tensor) and value.dim() == 0 and value.device.type == "cpu":
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    return int(value) if isinstance(value, Integral) else float(value)


def parts_of(value: Any) -> Sum:
    """Splits a value into a sum of symbols (by name), expressions and 1. A sum without the score is one term,
    unless it has only integers and indices: other dtypes may overflow."""
    if (number := number_of(value)) is not None:
        return {1: number}, []
    if not isinstance(value, Expression) or value.keywords:
        return {value: 1}, []
    name, arguments = value.name, value.arguments
    if value.function is None:
        return {name: 1}, []
    has_score, terms = "score" in value.symbols, []
    if name in ("where", "masked_fill") and len(arguments) == 3:
        condition, shown, hidden = arguments if name == "where" else (arguments[i] for i in (1, 2, 0))
        for kept, other, wanted in ((shown, hidden, True), (hidden, shown, False)):
            if number_of(other) == -inf:
                parts, conditions = parts_of(kept)
                return parts, [*conditions, (condition, wanted)]
    elif name in _SIGNS and len(arguments) == 2:
        terms = list(zip(arguments, _SIGNS[name], strict=True))
    elif name == "neg":
        terms = [(arguments[0], -1)]
    elif name == "mul":
        numbers = zip(arguments, map(number_of, arguments[::-1]), strict=True)
        terms = [(other, number) for other, number in numbers if number is not None]
    elif name in ("div", "truediv") and number_of(arguments[1]):
        terms = [(arguments[0], 1.0 / number_of(arguments[1]))]
    elif has_score and (name == "float" or (name == "to" and arguments[1:] == (torch.float32,))):
        terms = [(arguments[0], 1)]
    found: Sum = {}, []
    for each, factor in terms:
        parts, conditions = parts_of(each)
        if conditions and not factor > 0:
            return {value: 1}, []
        found[0].update({part: found[0].get(part, 0) + times * factor for part, times in parts.items()})
        found[1].extend(conditions)
    return found if terms and (has_score or is_linear(found)) else ({value: 1}, [])


def is_linear(found: Sum) -> bool:
    """Whether this is a linear form in the indices plus a number."""
    return found[0].keys() <= {"q_idx", "kv_idx", 1} and not found[1]


def _mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    if isinstance(value, (tuple, list)):
        return (tuple if isinstance(value, tuple) else list)(map(function, value))
    if isinstance(value, dict):
        return {name: function(part) for name, part in value.items()}
    if isinstance(value, slice):
        return slice(*map(function, (value.start, value.stop, value.step)))
    return value


def _expressions(value: Any) -> Any:
    return value.expression if isinstance(value, _Traced) else _mapped(value, _expressions)


def _leaves(value: Any) -> Iterator[Any]:
    if not isinstance(value, (tuple, list, dict, slice)):
        yield value
        return
    parts: list[Any] = []
    _mapped(value, parts.append)
    for part in parts:
        yield from _leaves(part)
