"""Copies of structs out of device, threadgroup and constant memory: `S s = p[i];`.

clang's copy constructors take thread objects only, so such initialisers go through softmetal::copy_of. Other
copies of whole structs between address spaces (assignments, arguments) are refused with a hint.
"""

from __future__ import annotations

from .lexer import TokenList
from .structure import Outline

_STATEMENT_STARTS = {";", "{", "}"}


def translate_struct_copies(tokens: TokenList, outline: Outline) -> None:
    for function in outline.functions:
        if function.body is None:
            continue
        for i in range(*function.body):
            if tokens.kind(i) == "name" and tokens.text(i) in outline.class_names:
                for begin, end in _declarators(tokens, i):
                    _translate_initialiser(tokens, begin, end)


def _declarators(tokens: TokenList, i: int) -> list[tuple[int, int]]:
    """Of the statement `[const] S a = x, b;`, if one starts with the struct's name at `i`."""
    begin = tokens.previous(i)
    if tokens.text(begin) == "const":
        begin = tokens.previous(begin)
    after = tokens.closing_angle(i + 1) + 1 if tokens.text(i + 1) == "<" else i + 1
    if tokens.text(begin) not in _STATEMENT_STARTS or tokens.kind(after) != "name":
        return []
    end = after
    while tokens.text(end) != ";":
        end = tokens.closing(end) + 1 if tokens.text(end) in ("(", "[", "{") else end + 1
    return tokens.split(after, end)


def _translate_initialiser(tokens: TokenList, begin: int, end: int) -> None:
    if tokens.text(begin + 1) == "=" and tokens.text(begin + 2) != "{":
        tokens[begin + 1].after += " ::softmetal::copy_of("
        tokens[end - 1].after += ")"
