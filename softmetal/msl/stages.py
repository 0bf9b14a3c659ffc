"""What a program has besides kernels and the functions that they call: vertex, fragment, mesh and object
functions, which go; built-in variables at program scope, which become those of the calling thread.
"""

from __future__ import annotations

from dataclasses import dataclass

from .attributes import attributes
from .kernels import THREAD_ATTRIBUTES
from .lexer import TokenList
from .structure import Function, Instantiation, Outline

_STAGES = {"vertex", "fragment", "mesh", "object", "intersection"}


def drop_stages(tokens: TokenList, outline: Outline) -> None:
    """No kernel can call them. Their types stay, so that structs of theirs can be a kernel's, too."""
    gone: set[str] = set()
    for function in list(outline.functions):
        if not _is_stage(tokens, function.begin, function.parameters[0]):
            continue
        gone.add(function.name)
        outline.functions.remove(function)
        tokens.blank(_begin(function), _end(tokens, function) + 1)
    for instantiation in list(outline.instantiations):
        if _is_stage(tokens, instantiation.begin, instantiation.end) or _names(tokens, instantiation) & gone:
            outline.instantiations.remove(instantiation)
            tokens.blank(instantiation.begin, instantiation.end + 1)


def _begin(function: Function) -> int:
    return function.begin if function.template_begin < 0 else function.template_begin


def _end(tokens: TokenList, function: Function) -> int:
    if function.body is not None:
        return function.body[1]
    end = function.parameters[1]
    while tokens.text(end) not in (";", ""):
        end += 1
    return end


def _is_stage(tokens: TokenList, begin: int, end: int) -> bool:
    """`vertex V f(` or `[[vertex]] V f(`."""
    depth = 0
    for i in range(begin, end):
        text = tokens.text(i)
        depth += {"(": 1, ")": -1}.get(text, 0)
        word = tokens.kind(i) == "name" and text in _STAGES and depth == 0
        if word and (text in ("vertex", "fragment") or _in_attribute(tokens, i)):
            return True
    return False


def _in_attribute(tokens: TokenList, i: int) -> bool:
    while tokens.text(i - 1) in (",", "") or tokens.kind(i - 1) == "name":
        i -= 1
    return tokens.text(i - 1) == "[" and tokens.is_attribute(i - 2)


def _names(tokens: TokenList, instantiation: Instantiation) -> set[str]:
    return {
        tokens.text(i)
        for i in range(instantiation.begin, instantiation.end)
        if tokens.kind(i) == "name" and tokens.text(i + 1) in ("<", "(")
    }


# ---- program scope -------------------------------------------------------------------------------


@dataclass
class Builtin:
    """uint2 place [[thread_position_in_grid]];"""

    name: str
    type: str
    attribute: str
    end: int  # its semicolon


def take_builtins(tokens: TokenList, outline: Outline) -> list[Builtin]:
    found = []
    for variable in list(outline.variables):
        names = [tokens.text(first) for first, _ in attributes(tokens, variable.name_index, variable.end)]
        if variable.scope == "namespace" and names and names[0] in THREAD_ATTRIBUTES:
            outline.variables.remove(variable)
            declared = tokens.join(variable.begin, variable.name_index)
            found.append(Builtin(variable.name, declared, names[0], variable.end))
            tokens.blank(variable.begin, variable.end + 1)
    return found


def place_builtins(tokens: TokenList, outline: Outline, builtins: list[Builtin]) -> None:
    """Each use becomes what the host headers get for a kernel's parameter; but for names that hide it."""
    for builtin in builtins:
        reason = f"'{builtin.name}' has the attribute '{builtin.attribute}', so it must be uint or ushort"
        check = f'static_assert(::softmetal::is_position<{builtin.type}>, "{reason}, or a vector of them");'
        tokens[builtin.end].after += check
        value = f"::softmetal::{THREAD_ATTRIBUTES[builtin.attribute]}::get<{builtin.type}>(nullptr)"
        for function in outline.functions:
            if function.body is None or function.body[0] < builtin.end:
                continue
            uses = [
                i
                for i in range(function.parameters[0], function.body[1])
                if tokens.text(i) == builtin.name and tokens.text(tokens.previous(i)) not in (".", "->")
            ]
            if not any(_is_declared(tokens, i) for i in uses):
                for i in uses:
                    tokens.overwrite(i, value)
                    _blank_scope(tokens, i)


def _blank_scope(tokens: TokenList, i: int) -> None:
    while tokens.text(i - 1) == "::":
        begin = i - 2 if tokens.kind(i - 2) == "name" else i - 1
        tokens.blank(begin, i)
        i = begin


def _is_declared(tokens: TokenList, i: int) -> bool:
    before = tokens.previous(i)
    return tokens.kind(before) == "name" and tokens.text(before) not in ("return", "else", "case", "do")
