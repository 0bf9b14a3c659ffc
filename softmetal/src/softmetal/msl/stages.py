"""Removes vertex, fragment, mesh and object functions, and translates built-in variables at program scope,
which have the values of the calling thread.
"""

from __future__ import annotations

from .attributes import attributes
from .kernels import THREAD_ATTRIBUTES
from .lexer import TokenList
from .structure import Function, Instantiation, Outline

_STAGES = {"vertex", "fragment", "mesh", "object", "intersection"}


def drop_stages(tokens: TokenList, outline: Outline) -> None:
    """Removes the functions of other stages, which no kernel can call. Their types stay: a kernel may use
    them too.
    """
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


def declare_builtins(tokens: TokenList, outline: Outline) -> None:
    """`uint2 place [[thread_position_in_grid]];` becomes a variable without a definition and a function
    that returns its value. passes/builtins.cpp calls the function where the variable is read: clang knows
    which uses of the name mean it.
    """
    number = 0
    for variable in list(outline.variables):
        names = [tokens.text(first) for first, _ in attributes(tokens, variable.name_index, variable.end)]
        if variable.scope != "namespace" or not names or names[0] not in THREAD_ATTRIBUTES:
            continue
        outline.variables.remove(variable)
        kind = tokens.join(variable.begin, variable.name_index)
        plain = f"::metal::remove_cv_t<{kind}>"
        reason = f"'{variable.name}' has the attribute '{names[0]}', so it must be uint or ushort"
        symbol, getter = f"softmetal_builtin_{number}", f"static {kind} softmetal_value_{number}()"
        value = f"::softmetal::{THREAD_ATTRIBUTES[names[0]]}::get<{plain}>(nullptr)"
        tokens[variable.begin].before += (
            f'static_assert(::softmetal::is_position<{plain}>, "{reason}, or a vector of them"); '
            f'__attribute__((used)) {getter} __asm__("{symbol}_value"); {getter} {{ return {value}; }} '
            "extern const "
        )
        tokens[variable.name_index].after += f' __asm__("{symbol}")'
        number += 1
