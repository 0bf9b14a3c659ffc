"""Finds the function constants that a kernel may read, itself or through the functions it calls.

Names decide, so overloads and methods with one name count as one function: the result may hold too many
constants, never too few.
"""

from __future__ import annotations

from collections import defaultdict

from .lexer import TokenList
from .structure import Outline


def names_reached(tokens: TokenList, outline: Outline) -> dict[str, set[str]]:
    """For every kernel, by function name: all names that its code mentions, directly or through what it
    mentions.
    """
    mentions: dict[str, set[str]] = defaultdict(set)
    for function in outline.functions:
        if function.body is not None:
            begin = function.begin if function.template_begin < 0 else function.template_begin
            mentions[function.name] |= _names(tokens, begin, function.body[1])
    for variable in outline.variables:
        mentions[variable.name] |= _names(tokens, variable.begin, variable.end)
    return {f.name: _closure(f.name, mentions) for f in outline.functions if f.is_kernel}


def _names(tokens: TokenList, begin: int, end: int) -> set[str]:
    return {tokens.text(i) for i in range(begin, end) if tokens.kind(i) == "name"}


def _closure(start: str, mentions: dict[str, set[str]]) -> set[str]:
    reached, waiting = set(), [start]
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting += mentions.get(name, ())
    return reached
