"""Recursion, which Metal does not have. Names that call each other in a circle are cheap to find but may
be overloads or different instantiations of a template; only then clang's unoptimised LLVM code, where
every call names its target, decides.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from .lexer import TokenList, TranslationError
from .structure import Outline

_DEFINITION = re.compile(r"^define .*?@\"?([\w.$]+)\"?\(", re.MULTILINE)
_CALL = re.compile(r"\b(?:call|invoke)\b[^\n]*?@\"?([\w.$]+)\"?\(")

Graph = dict[str, set[str]]


def check_recursion(tokens: TokenList, outline: Outline, llvm_code: str) -> None:
    suspects = _on_a_circle(_calls_by_name(tokens, outline))
    if not suspects:
        return
    recursive = _on_a_circle(_calls_by_symbol(llvm_code))
    for function in outline.functions:
        symbol_part = f"{len(function.name)}{function.name}"
        if function.body and function.name in suspects and any(symbol_part in symbol for symbol in recursive):
            raise TranslationError(
                tokens[function.parameters[0]].where,
                f"'{function.name}' calls itself: Metal has no recursion",
            )


def _calls_by_name(tokens: TokenList, outline: Outline) -> Graph:
    names = {function.name for function in outline.functions if function.body is not None}
    graph: Graph = {name: set() for name in names}
    for function in outline.functions:
        if function.body is not None:
            begin, end = function.body
            graph[function.name] |= {
                tokens.text(i)
                for i in range(begin, end)
                if tokens.kind(i) == "name" and tokens.text(i) in names
            }
    return graph


def _calls_by_symbol(llvm_code: str) -> Graph:
    graph: Graph = {}
    starts = list(_DEFINITION.finditer(llvm_code))
    for start, following in zip(starts, [*starts[1:], None], strict=True):
        body = llvm_code[start.end() : following.start() if following else len(llvm_code)]
        graph[start.group(1)] = set(_CALL.findall(body))
    return graph


def _on_a_circle(graph: Graph) -> set[str]:
    return {name for name in graph if name in _reachable(graph, graph[name])}


def _reachable(graph: Graph, start: Iterable[str]) -> set[str]:
    seen: set[str] = set()
    pending = list(start)
    while pending:
        name = pending.pop()
        if name not in seen:
            seen.add(name)
            pending += graph.get(name, ())
    return seen
