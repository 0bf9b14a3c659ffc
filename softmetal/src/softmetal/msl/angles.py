"""Finds the '<' and '>' that enclose template arguments. C++'s rule needs the names of all templates."""

from __future__ import annotations

import re

from .lexer import TokenList
from .types import BUILTIN_TYPES

_CASTS = {"static_cast", "reinterpret_cast", "const_cast", "as_type"}
_LIBRARY_TEMPLATES = re.compile(
    r"(is|has|add|remove|make|enable|integral|bool|numeric|atomic|simdgroup|texture|depth|packed)_\w+"
    r"|conditional(_t)?|underlying_type(_t)?|decay(_t)?|declval|forward|move|rank|extent|common_type(_t)?"
    r"|(texture|depth)(1d|2d|3d|cube|buffer)\w*|_?atomic|packed_vec|vec|matrix|array|array_ref|uniform"
    r"|(visible_function|intersection_function)_table|mesh|interpolant|rgba?\w*norm"
    r"|tensor\w*|d?extents|cooperative_tensor\w*|matmul2d|execution_(threads|simdgroups)"
    r"|get_\w+_cooperative_tensor|reduction_operation_identity|dynamic_length_v|slice"
)
_OPENING = {"(", "[", "{"}
_CLOSING = {")", "]", "}"}


def template_brackets(tokens: TokenList) -> dict[int, int]:
    """The positions of the brackets of template parameters and arguments; each maps to the other of its
    pair.
    """
    templates, function_templates = _declared_templates(tokens)
    pairs: dict[int, int] = {}
    open_brackets: list[int] = []
    for i, token in enumerate(tokens.tokens):
        if token.kind != "op":
            continue
        if token.text in _OPENING:
            open_brackets.append(i)
        elif token.text in _CLOSING:
            while open_brackets and tokens.text(open_brackets[-1]) == "<":
                open_brackets.pop()  # not closed: a comparison
            open_brackets.pop()
        elif token.text == ";":
            while open_brackets and tokens.text(open_brackets[-1]) == "<":
                open_brackets.pop()
        elif token.text == "<" and _opens(tokens, i, templates | function_templates):
            open_brackets.append(i)
        elif token.text == ">" and open_brackets and tokens.text(open_brackets[-1]) == "<":
            begin = open_brackets.pop()
            name = tokens.text(tokens.previous(begin))
            if (
                name in function_templates
                and name not in templates
                and _starts_operand(tokens, tokens.next(i))
            ):
                continue  # compares a variable of that name: a specialised function is called
            pairs[begin], pairs[i] = i, begin
    return pairs


def _opens(tokens: TokenList, i: int, templates: set[str]) -> bool:
    before = tokens.previous(i)
    name = tokens.text(before)
    if name == "template" or tokens.text(tokens.previous(before)) == "template":
        return True
    if tokens.kind(before) != "name":
        return False
    if name in templates or name in _CASTS or _LIBRARY_TEMPLATES.fullmatch(name):
        return True
    close = tokens.closing_angle(i)
    if close > 0 and tokens.text(tokens.next(close)) == "::":
        return True
    # After any other name, a type that is not the start of an expression can only be an argument.
    after = tokens.next(i)
    return tokens.text(after) in BUILTIN_TYPES and tokens.text(tokens.next(after)) not in ("(", "{")


def _starts_operand(tokens: TokenList, i: int) -> bool:
    return tokens.kind(i) in ("name", "number", "string") or tokens.text(i) in ("-", "+", "!", "~")


def _declared_templates(tokens: TokenList) -> tuple[set[str], set[str]]:
    """Names of the program's own templates: classes, aliases and variables; functions."""
    names: tuple[set[str], set[str]] = (set(), set())
    for i, token in enumerate(tokens.tokens):
        if token.kind == "name" and token.text == "template" and tokens.text(tokens.next(i)) == "<":
            close = tokens.closing_angle(tokens.next(i))
            if close > 0:
                name, is_function = _declared_name(tokens, tokens.next(close))
                names[is_function].add(name)
    return names[0] - {""}, names[1] - {""}


def _declared_name(tokens: TokenList, i: int) -> tuple[str, bool]:
    """The name that the declaration at `i` declares, and whether it is a function. The name of a class or
    alias, else the last name before a token that cannot belong to a type.
    """
    if tokens.text(i) in ("struct", "class", "union", "using"):
        return tokens.text(tokens.next(i)) if tokens.kind(tokens.next(i)) == "name" else "", False
    name = ""
    while i < len(tokens) and tokens.text(i) not in ("(", "=", ";", "{"):
        if tokens.is_attribute(i):
            i = tokens.closing(i)
        elif tokens.text(i) == "<" and tokens.closing_angle(i) > 0:
            i = tokens.closing_angle(i)
        elif tokens.kind(i) == "name":
            name = tokens.text(i)
            if name in ("decltype", "__attribute__", "alignas"):
                i = tokens.closing(tokens.next(i))
        i = tokens.next(i)
    return "" if name in ("template", "operator") else name, tokens.text(i) == "("
