"""Errors of public functions: each is one sentence that begins with the name of the called function.

`public` checks the types of the arguments before the function runs. If a function calls another public one,
`public` replaces the inner name in an error with the outer one.
"""

from __future__ import annotations

import copy
import functools
import inspect
import os
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, Literal, NoReturn, TypeVar, get_args, get_origin

import torch
from torch import Tensor
from torch.overrides import is_tensor_like

from . import options as options_of_operators

__all__ = ["SIGNATURES", "Signature", "check_tensor", "check_writable", "is_checked", "public", "shown"]

_Function = TypeVar("_Function", bound=Callable[..., Any])
_NAMED = re.compile(r"((?:fattn|torch_fattn|PagedCache|PagedKVCache|StateCache|StaticKVCache)\b[\w.]*): ")
_NONE = type(None)
_WORDS: dict[Any, str] = {
    Tensor: "a tensor",
    float: "a number",
    int: "a whole number",
    bool: "True or False",
    str: "a string",
    _NONE: "None",
}
_SYMBOLS: dict[Any, tuple[type, ...]] = {
    bool: (torch.SymBool,),
    int: (torch.SymInt,),
    float: (torch.SymInt, torch.SymFloat),
}
_LARGEST = 2**63
_LONGEST = 100  # characters of a quoted value


def check_tensor(name: str, what: str, operand: Any, shape: str = "") -> None:
    if not isinstance(operand, Tensor) and not _stands_in(operand):
        _refuse(name, what, operand, "a tensor" + (f" of shape {shape}" if shape else ""))


def check_writable(name: str, **written: Tensor) -> None:
    """Raises for memory that torch would refuse to write, with the argument's name."""
    if torch.compiler.is_compiling():  # Dynamo cannot trace these
        return
    for what, tensor in written.items():
        if tensor.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                f"{name}: {what} requires grad, and caches do not support gradients; pass {what}.detach(), "
                "or call under torch.no_grad()"
            )
        if tensor.is_inference() and not torch.is_inference_mode_enabled():
            raise RuntimeError(
                f"{name}: {what} is an inference tensor, which can be written in inference mode only; call "
                "under torch.inference_mode(), or allocate it outside of the mode"
            )
        if tensor.is_neg():
            raise ValueError(
                f"{name}: {what} is a negated view and is written in place; pass the result "
                "of its .resolve_neg()"
            )


def shown(value: Any) -> str:
    """Quotes a value for a message."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:56]} ..."


def is_checked(numbers: Tensor | None = None) -> bool:
    """Whether to check numbers on the device (FATTN_CHECK=1); "meta" tensors have none."""
    is_there = not torch.compiler.is_compiling() and (numbers is None or not numbers.is_meta)
    return is_there and os.environ.get("FATTN_CHECK", "") not in ("", "0")


def _refuse(name: str, what: str, value: Any, wanted: str) -> NoReturn:
    found = "None" if value is None else f"of type {type(value).__name__}"
    if isinstance(value, tuple) or (isinstance(value, list) and "a tuple" in wanted):
        found = shown(value)
    raise TypeError(f"{name}: {what} is {found}; pass {wanted}") from None


def _stands_in(value: Any) -> bool:
    """Whether this is a tracer's proxy for any argument, such as torch.fx's. A Tensor is not."""
    return not isinstance(value, (Tensor, type)) and is_tensor_like(value)


def _without_strides(value: Any) -> tuple[str, str] | None:
    """Describes a tensor that no kernel can read, and what to pass instead."""
    if not isinstance(value, Tensor):
        return None
    if value.is_nested:
        return "nested", "a dense tensor, or packed sequences to fattn.varlen_prefill"
    if value.layout != torch.strided:
        kind = "sparse" if "sparse" in str(value.layout) else f"of layout {value.layout}"
        return kind, ".to_dense()"
    return (f"of the quantized {value.dtype}", ".dequantize()") if value.is_quantized else None


class _Kind:
    """The values that an annotation allows."""

    def __init__(self, annotation: Any) -> None:
        self.parts = get_args(annotation) if _is_union(annotation) else (annotation,)
        self.any = Any in self.parts
        classes = {part for part in self.parts if isinstance(part, type)}
        self.exact = frozenset(classes | ({int} if float in classes else set()))  # a fast path

    @property
    def words(self) -> str:
        return " or ".join(_words_of(part) for part in self.parts)

    def takes(self, value: Any) -> bool:
        return self.any or any(_takes(part, value) for part in self.parts) or _stands_in(value)

    def stranger_in(self, value: Any) -> list[Any]:
        """The first member of a list with a wrong type."""
        members = [get_args(part)[0] for part in self.parts if get_origin(part) is Sequence]
        if not members or not _is_list(value):
            return []
        return [member for member in value if not _takes(members[0], member)][:1]


def _is_union(annotation: Any) -> bool:
    return type(annotation).__name__ in ("UnionType", "Union", "_UnionGenericAlias")


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def _words_of(part: Any) -> str:
    if get_origin(part) is Sequence:
        member = _words_of(get_args(part)[0]).removeprefix("a ")
        return f"a list of {member.replace('list', 'lists') if 'list' in member else member + 's'}"
    if get_origin(part) is tuple:
        return f"a tuple ({', '.join(_Kind(member).words for member in get_args(part))})"
    if get_origin(part) is not None:
        return f"a {get_origin(part).__name__}"
    if part in _WORDS:
        return _WORDS[part]
    return f"a {'torch.' if part.__module__ == 'torch' else ''}{part.__name__}"


def _takes(part: Any, value: Any) -> bool:
    of = get_origin(part) or part
    if of in (Iterable, Literal):
        return True  # the function has its own message for other members
    if of is Sequence:
        kind = get_args(part)[0]
        if not _is_list(value):
            return False
        return set(map(type, value)) <= {kind} or all(_takes(kind, member) for member in value)
    if of is tuple:
        kinds = [_Kind(member) for member in get_args(part)]
        return _is_list(value) and len(value) == len(kinds) and all(map(_Kind.takes, kinds, value))
    if of is bool:
        return isinstance(value, _SYMBOLS[bool]) or type(value).__name__ in ("bool", "bool_")  # numpy's too
    if of is int or of is float:
        if isinstance(value, Tensor):  # torch accepts a tensor as a number
            is_number = value.dim() == 0 and not value.is_complex() and not value.is_meta
            return of is float and is_number
        numbers = (Integral if of is int else Real, *_SYMBOLS[of])
        return isinstance(value, numbers) and not isinstance(value, bool)
    return isinstance(value, of)


_Given = list[tuple[str, _Kind, Any]]  # named arguments of a call


class Signature:
    """The arguments of a public function; with `options`, also an operator's, or those of these defaults."""

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        options: str | Mapping[str, Any] | None = None,
        refused_by: str | None = None,
        any_layout: bool = False,
        any_text: bool = False,
        names: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.function = function
        self._names = names or {}
        self._refused_by = refused_by
        self._any_layout = any_layout
        self._any_text = any_text
        named = options_of_operators.expand_options(function, options) if options else ()
        self._options = named if isinstance(options, str) else ()
        self._arguments = inspect.signature(function)
        parameters = self._arguments.parameters.values()
        self._takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters)
        self._kinds = {
            each.name: _Kind(_evaluated(each.annotation, function))
            for each in parameters
            if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD) and each.name != "self"
        }
        self._places = tuple(
            each.name
            for each in parameters
            if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
        )
        # The operator's message for None contains the shape.
        judges_none = name.startswith("fattn.")
        self._exact = {
            what: kind.exact | {_NONE} if judges_none and Tensor in kind.exact else kind.exact
            for what, kind in self._kinds.items()
        }

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._kinds)

    @property
    def operands(self) -> tuple[str, ...]:
        """The tensors that every call has."""
        needed = self._arguments.parameters
        return tuple(
            name
            for name, kind in self._kinds.items()
            if Tensor in kind.parts and needed[name].default is inspect.Parameter.empty
        )

    def of_class(self, cls: Any) -> Signature:
        """The signature of an inherited method, with the class's `_name`."""
        name = f"{cls._name}.{self.name.rpartition('.')[2]}"
        if name not in SIGNATURES:
            SIGNATURES[name] = copy.copy(self)
            SIGNATURES[name].name = name
        return SIGNATURES[name]

    def check(self, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
        """Raises TypeError for an argument of a wrong type."""
        exact = self._exact
        for what, value in zip(self._places, arguments, strict=False):
            if what != "self" and type(value) not in exact[what]:
                self._look_closer(what, value)
        for what, value in keywords.items():
            if what not in exact:
                self._refuse_unknown(what)
            elif type(value) not in exact[what]:
                self._look_closer(what, value)

    def check_call(self, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
        """Raises TypeError also for a missing or superfluous argument."""
        self.check(arguments, keywords)
        if fault := self._fault_of_call(arguments, keywords):
            raise fault
        given = self._given(arguments, keywords)
        self._check_layouts(given)
        self._check_strictly(given)

    def of(self, arguments: tuple[Any, ...], keywords: Mapping[str, Any], error: Exception) -> Exception:
        """Renames the error to this function. An error without a name is a bug here or in torch, unless an
        argument explains it."""
        given = self._given(arguments, keywords)
        self._check_layouts(given)
        self._check_lengths(given)
        if str(error).startswith("fattn attention in "):  # followed by the name of a layer
            return error
        named = _NAMED.match(str(error))
        if named is None or self._refused_by is not None:
            if fault := self._fault_of_call(arguments, keywords):
                return fault
            self._check_strictly(given)
            on_meta = [what for what, _kind, value in given if isinstance(value, Tensor) and value.is_meta]
            # First: a mode may intercept the operator, and raise, as that of selective checkpoints does.
            if on_meta and (
                " is on meta" in str(error) or torch.ops.fattn._torch_error(str(error)) == "no_data"
            ):
                raise ValueError(
                    f"{self.name}: {on_meta[0]} is on meta, which has no data; pass a tensor with data"
                ) from None
            if self._refused_by is not None:
                error = _refusal(self._refused_by, given) or error
                named = _NAMED.match(str(error))
        if named is None or (named.group(1) == self.name and not self._names):
            return error
        words = str(error)[named.end(1) :]
        for theirs, own in self._names.items():
            words = re.sub(rf"\b{theirs}\b", own, words)
        return type(error)(self.name + words)

    def _fault_of_call(self, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> TypeError | None:
        """The error of a call with a missing or superfluous argument."""
        try:
            self._arguments.bind(*arguments, **keywords)
        except TypeError as error:
            places = [name for name in self._places if name != "self"]
            advice = self._listed("arguments by position", places)
            named = re.search(r"'(\w+)'", str(error))
            if named and named[1] in self._kinds.keys() - {*places}:
                advice = f"pass it by name, {self._kinds[named[1]].words}"
            return TypeError(f"{self.name}: {error}; {advice}")
        return None

    def _given(self, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> _Given:
        given = {**dict(zip(self._places, arguments, strict=False)), **keywords}
        return [(what, self._kinds[what], value) for what, value in given.items() if what in self._kinds]

    def _check_layouts(self, given: _Given) -> None:
        """Refuses layouts for which torch's own message would be its whole table of kernels."""
        if self._any_layout:
            return
        for what, _kind, value in given:
            if found := _without_strides(value):
                raise TypeError(f"{self.name}: {what} is {found[0]}; pass {found[1]}") from None

    def _check_strictly(self, given: _Given) -> None:
        for what, kind, value in given:
            if not kind.takes(value):
                _refuse(self.name, what, value, kind.words)
        self._check_lengths(given)

    def _check_lengths(self, given: _Given) -> None:
        """Refuses numbers and strings that are too long for messages or C++."""
        for what, _kind, value in given:
            if isinstance(value, int) and not -_LARGEST <= value < _LARGEST:
                raise ValueError(
                    f"{self.name}: {what} is a number of {value.bit_length()} bits; pass one of at most 63"
                ) from None
            is_short = isinstance(value, str) and value.isprintable() and len(value) <= _LONGEST
            if isinstance(value, str) and not (is_short or self._any_text):
                raise ValueError(
                    f"{self.name}: {what} is {shown(value)}; pass up to {_LONGEST} printable characters"
                ) from None

    def _look_closer(self, what: str, value: Any) -> None:
        kind = self._kinds[what]
        if kind.takes(value):
            is_number = isinstance(value, Tensor) and Tensor not in kind.parts
            if is_number and value.requires_grad and torch.is_grad_enabled():
                # torch would read the number and drop the gradient.
                other = ", or multiply the query by it and pass 1.0" if "scal" in what else ""
                raise NotImplementedError(
                    f"{self.name}: {what} is a tensor that requires grad, and a number has no gradient; pass "
                    f"{what}.item(){other}"
                )
            return
        if stranger := kind.stranger_in(value):
            raise TypeError(f"{self.name}: {what} holds {shown(stranger[0])}; pass {kind.words}")
        _refuse(self.name, what, value, kind.words)

    def _refuse_unknown(self, what: str) -> None:
        if self._takes_any:
            return
        hint = options_of_operators.hint(what, self.names)
        kind, names = ("option", self._options) if self._options else ("argument", self.names)
        raise TypeError(f"{self.name}: there is no {kind} {what!r}{hint}; {self._listed(f'{kind}s', names)}")

    @staticmethod
    def _listed(kind: str, names: Sequence[str]) -> str:
        return f"the {kind} are {textwrap.shorten(', '.join(names), 180, placeholder=' ...') or 'none'}"


SIGNATURES: dict[str, Signature] = {}  # keyed by the name in errors


def public(
    name: str,
    *,
    options: str | Mapping[str, Any] | None = None,
    refused_by: str | None = None,
    ahead: bool = True,
    renames: bool = True,
    any_layout: bool = False,
    any_text: bool = False,
    inherited: bool = False,
    names: Mapping[str, str] | None = None,
) -> Callable[[_Function], _Function]:
    """Decorates a function whose errors begin with `name`.

    options: the operator whose options it takes, or their defaults, as `**options: Unpack[...]`.
    refused_by: the operator whose message covers mismatched shapes.
    ahead: False: types are checked only after an error.
    renames: False: an error in the name of another public function stays.
    inherited: True: a method of several classes. An error has the `_name` of the class of `self`.
    names: this function's names for arguments of the functions that it calls.
    any_layout: True: torch accepts sparse and nested tensors here, and raises its own errors for others.
    any_text: True: an error of a call with a long or unprintable string stays.
    """

    def decorate(function: _Function) -> _Function:
        signature = Signature(name, function, options, refused_by, any_layout, any_text, names)
        SIGNATURES[name] = signature

        @functools.wraps(function)
        def call(*arguments: Any, **keywords: Any) -> Any:
            if torch.compiler.is_compiling():
                return function(*arguments, **keywords)
            called = signature.of_class(type(arguments[0])) if inherited and arguments else signature
            if ahead:
                called.check(arguments, keywords)
            try:
                return function(*arguments, **keywords)
            except Exception as error:
                own = called.of(arguments, keywords, error) if renames else error
                if own is error:
                    raise
                raise own from None

        signature.function = call
        return call  # type: ignore[return-value]

    return decorate


def _refusal(op: str, given: _Given) -> Exception | None:
    def planned(kind: _Kind, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.detach().to("meta") if Tensor in kind.exact else float(value)

    try:
        named = {what: planned(kind, value) for what, kind, value in given}
        getattr(torch.ops.fattn, f"_plan_{op}")(**named)
    except (NotImplementedError, RuntimeError, TypeError, ValueError) as refusal:
        return refusal
    return None


def _evaluated(annotation: Any, function: Callable[..., Any]) -> Any:
    if not isinstance(annotation, str):
        return annotation
    return eval(annotation, inspect.unwrap(function).__globals__)  # a context manager wraps its function
