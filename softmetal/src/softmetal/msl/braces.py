"""Braced lists as arguments, `f({1, 2})`: clang does not convert a list to a vector.

The list becomes ::softmetal::braced(1, 2), which converts to any vector or struct that the list could
initialise. This file also translates string literals, which are in constant memory in Metal.
"""

from __future__ import annotations

from .lexer import TokenList
from .structure import Outline

_NO_CALLS = {"if", "for", "while", "switch", "return", "sizeof", "alignas", "decltype", "static_assert"}
_OTHER_LITERALS = {"static_assert", "asm", "__asm", "__asm__", "extern"}


def translate_braced_arguments(tokens: TokenList, outline: Outline) -> None:
    for function in outline.functions:
        if function.body is None:
            continue
        for i in range(*function.body):
            if tokens.text(i) == "{" and tokens.kind(i) == "op" and _is_argument(tokens, i):
                close = tokens.closing(i)
                inside = [tokens.text(k) for k in range(i + 1, close)]
                if "," in inside and "{" not in inside:
                    tokens.overwrite(i, "::softmetal::braced(")
                    tokens.overwrite(close, ")")


def _is_argument(tokens: TokenList, brace: int) -> bool:
    after = tokens.text(tokens.next(tokens.closing(brace)))
    before = tokens.previous(brace)
    if tokens.text(before) not in ("(", ",") or after not in (")", ","):
        return False
    while tokens.text(before) != "(":
        if tokens.text(before) in (")", "]", "}") and tokens.kind(before) == "op":
            before = tokens.opening(before)
        elif tokens.text(before) in ("{", ";", "["):
            return False
        before = tokens.previous(before)
    callee = tokens.previous(before)
    if tokens.text(callee) == ">":
        return True
    return tokens.kind(callee) in ("name", "raw") and tokens.text(callee) not in _NO_CALLS


def translate_string_literals(tokens: TokenList) -> None:
    for i, token in enumerate(tokens.tokens):
        if token.kind != "string" or not token.text.startswith(('"', "R")) or tokens.kind(i - 1) == "string":
            continue
        words = {tokens.text(i - 1), tokens.text(i - 2)}
        opening = i
        while opening >= 0 and tokens.text(opening) not in (";", "{", "}"):
            words.add(tokens.text(opening))
            opening -= 1
        if not words & _OTHER_LITERALS:
            token.before += "(SOFTMETAL_CONSTANT char*)"
