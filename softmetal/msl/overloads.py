"""Kernel templates that share a name: as no function calls a kernel, each gets a name of its own."""

from __future__ import annotations

from collections import defaultdict

from .attributes import attributes
from .lexer import TokenList, TranslationError
from .structure import Function, Instantiation, Outline
from .types import ADDRESS_SPACES

_SHAPE = ADDRESS_SPACES | {"*", "&", "const", "["}


def separate_overloads(tokens: TokenList, outline: Outline) -> None:
    overloads: dict[tuple[str, str], list[Function]] = defaultdict(list)
    for function in outline.functions:
        if function.is_kernel and function.is_template and function.body is not None:
            overloads[function.namespace, function.name].append(function)
    for (_, name), functions in overloads.items():
        if len(functions) < 2:
            continue
        for number, function in enumerate(functions):
            function.name = f"{name}_{number}_overload"
            tokens[function.parameters[0] - 1].text = function.name
        for instantiation in outline.instantiations:
            index = _designator(tokens, instantiation, name)
            if index >= 0:
                tokens[index].text = _chosen(tokens, functions, instantiation, index).name


def _designator(tokens: TokenList, instantiation: Instantiation, name: str) -> int:
    for i in range(instantiation.begin, instantiation.end):
        if tokens.text(i) == name and tokens.text(i + 1) in ("<", "("):
            return i
    return -1


def _chosen(
    tokens: TokenList, functions: list[Function], instantiation: Instantiation, index: int
) -> Function:
    """By the parameters: how many, to which memory, and the words of their types."""
    opening = tokens.closing_angle(index + 1) + 1 if tokens.text(index + 1) == "<" else index + 1
    given = _parameters(tokens, opening) if tokens.text(opening) == "(" else None
    arguments = len(tokens.split(index + 2, opening - 1)) if opening > index + 1 else 0
    best, most = None, -1
    for function in functions:
        own = _parameters(tokens, function.parameters[0])
        heads = tokens.split(function.template_begin + 2, function.begin - 1)
        if given is None or len(own) != len(given) or arguments > len(heads):
            continue
        if any(a & _SHAPE != b & _SHAPE for a, b in zip(own, given, strict=True)):
            continue
        alike = sum(len(a & b) for a, b in zip(own, given, strict=True)) - abs(len(heads) - arguments)
        if alike > most or best is None:
            best, most = function, alike
    if best is None:
        raise TranslationError(
            tokens[instantiation.begin].where,
            f"no overload of kernel '{tokens.text(index)}' has these parameters",
        )
    return best


def _parameters(tokens: TokenList, opening: int) -> list[set[str]]:
    """The words and marks of each parameter, without its name and attributes."""
    found = []
    for begin, end in tokens.split(opening + 1, tokens.closing(opening)):
        hidden = {i for first, last in attributes(tokens, begin, end) for i in range(first - 2, last + 2)}
        found.append({tokens.text(i) for i in range(begin, end) if i not in hidden})
    return found
