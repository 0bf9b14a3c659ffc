"""Runs of neighbouring elements: `for (j = 0; j < N; j++) ... = p[i + j]` with a constant N and a device
pointer p.

An Apple GPU loads up to four neighbours in one instruction at any alignment; CUDA's compiler joins loads only
if it knows that the address is aligned. If the caller promises that every such run starts on a multiple of
its size (up to 16 bytes), and that no kernel writes data that it reads as a run, this pass marks the runs in
the program. Kernels with scalar loads are then not slower. A pointer whose type is a template parameter may
be to any memory: its runs are aligned too, but may be written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from softmetal.msl.lexer import TokenList
from softmetal.msl.structure import Outline
from softmetal.msl.types import ADDRESS_SPACES

_ASSIGNMENTS = {"=", "+=", "-=", "*=", "/=", "&=", "|=", "^="}


@dataclass
class _Loop:
    variable: str
    bound: str
    body: tuple[int, int]


def declare_runs(tokens: TokenList, program: Outline, generic: Sequence[tuple[int, int]]) -> None:
    """Must run before address spaces are dropped. Skips the functions in `generic`, which serve several
    spaces."""
    constants = _constant_names(tokens)
    type_parameters = _type_parameters(tokens)
    outside = set(range(len(tokens)))
    for function in program.functions:
        outside -= set(range(function.parameters[0], (function.body or function.parameters)[1]))
    members = sorted(outside)
    shared = _const_pointers(tokens, members) - _arrays(tokens, members)
    for function in program.functions:
        if function.body is None or any(first <= function.begin < last for first, last in generic):
            continue
        begin, end = function.parameters[0], function.body[1]
        spans = [span for span in tokens.split(begin + 1, function.parameters[1]) if span[0] < span[1]]
        parameters = {tokens.text(_name_of(tokens, *span)) for span in spans}
        of_any_type = {
            tokens.text(_name_of(tokens, *span)) for span in spans if tokens.text(span[0]) in type_parameters
        }
        own = _const_pointers(tokens, range(begin, end))
        arrays = _arrays(tokens, range(begin, end))
        pointers = (own | (shared - parameters)) - arrays
        for loop in _loops(tokens, *function.body, constants):
            for i in range(*loop.body):
                if tokens.kind(i) != "name" or tokens.text(i + 1) != "[":
                    continue
                if tokens.text(i) in pointers:
                    _declare(tokens, i, loop, "run")
                elif tokens.text(i) in of_any_type:
                    _declare(tokens, i, loop, "run_of_any")


def _constant_names(tokens: TokenList) -> set[str]:
    """constexpr variables and template parameters."""
    names: set[str] = set()
    for i in range(len(tokens)):
        if tokens.text(i) == "constexpr":
            while tokens.text(i) not in ("=", "(", ";", "{", ""):
                i += 1
            if tokens.text(i) == "=":
                names.add(tokens.text(i - 1))
        elif tokens.text(i) == "template" and tokens.text(i + 1) == "<":
            close = tokens.closing_angle(i + 1)
            for _, end in tokens.split(i + 2, close):
                equals = next((k for k in range(_, end) if tokens.text(k) == "="), end)
                names.add(tokens.text(equals - 1))
    return names


def _type_parameters(tokens: TokenList) -> set[str]:
    """Names of template parameters that are types."""
    return {
        tokens.text(i + 1)
        for i in range(len(tokens))
        if tokens.text(i) in ("typename", "class") and tokens.text(i + 2) in (",", ">", "=")
    }


def _const_pointers(tokens: TokenList, places: Sequence[int]) -> set[str]:
    """Names declared as `const device T*` and never as another pointer."""
    names: set[str] = set()
    others: set[str] = set()
    for i in places:
        if tokens.kind(i) != "name" or tokens.text(i) not in ADDRESS_SPACES:
            continue
        is_const = tokens.text(i) == "device" and "const" in (tokens.text(i - 1), tokens.text(i + 1))
        k = i + 1
        while tokens.kind(k) and (tokens.kind(k) == "name" or tokens.text(k) in ("::", "<")):
            k = tokens.closing_angle(k) + 1 if tokens.text(k) == "<" else k + 1
        if tokens.text(k) == "*" and tokens.kind(k + 1) == "name":
            is_array = tokens.text(k + 2) == "[" and not tokens.is_attribute(k + 2)
            (names if is_const and not is_array else others).add(tokens.text(k + 1))
    return names - others


def _arrays(tokens: TokenList, places: Sequence[int]) -> set[str]:
    """Names declared as arrays, `T name[n]` or `T other, name[n]`; elsewhere they may be pointers."""
    names: set[str] = set()
    for i in places:
        before = tokens.text(i - 1)
        if tokens.kind(i) != "name" or not (before == ">" or tokens.kind(i - 1) == "name"):
            continue
        end = i
        while before != "return" and tokens.text(end) not in (";", ")", "}", ""):
            end = tokens.closing(end) + 1 if tokens.text(end) in ("(", "[", "{") else end + 1
        for k, _ in tokens.split(i, end):
            if tokens.kind(k) == "name" and tokens.text(k + 1) == "[" and not tokens.is_attribute(k + 1):
                names.add(tokens.text(k))
    return names


def _name_of(tokens: TokenList, begin: int, end: int) -> int:
    """The declared name of a parameter: its last name outside of brackets."""
    i, last = begin, begin
    while i < end and tokens.text(i) not in ("=", "["):
        if tokens.text(i) == "<" and tokens.closing_angle(i) > 0:
            i = tokens.closing_angle(i)
        elif tokens.kind(i) == "name":
            last = i
        i += 1
    return last


def _loops(tokens: TokenList, begin: int, end: int, constants: set[str]) -> Iterator[_Loop]:
    for i in range(begin, end):
        if tokens.kind(i) != "name" or tokens.text(i) != "for":
            continue
        close = tokens.closing(i + 1)
        semicolons = [k for k in range(i + 2, close) if tokens.text(k) == ";"]
        if len(semicolons) != 2:
            continue
        first, second = semicolons
        header = [(i + 2, first), (first + 1, second), (second + 1, close)]
        start, condition, step = (tokens.join(*part).replace(" ", "") for part in header)
        variable = tokens.text(header[1][0])
        bound = tokens.join(header[1][0] + 2, header[1][1])
        names = {tokens.text(k) for k in range(header[1][0] + 2, header[1][1]) if tokens.kind(k) == "name"}
        counts = start.endswith(f"{variable}=0") and condition.startswith(f"{variable}<")
        if counts and step in (f"{variable}++", f"++{variable}") and names <= constants:
            body_end = (
                tokens.closing(close + 1)
                if tokens.text(close + 1) == "{"
                else _statement_end(tokens, close + 1)
            )
            yield _Loop(variable, bound, (close + 1, body_end))


def _statement_end(tokens: TokenList, i: int) -> int:
    while tokens.text(i) != ";":
        i = tokens.closing(i) + 1 if tokens.text(i) in ("(", "[", "{") else i + 1
    return i


def _declare(tokens: TokenList, name: int, loop: _Loop, function: str) -> None:
    """p[a + j] -> run<N>(p + (a))[j], if j is the last term and p[...] is only read. In run_of_any, it may be
    a function of j, as the places of a lane's elements are in torch's tensor kernel."""
    opening, closing = name + 1, tokens.closing(name + 1)
    last = closing - 1
    if (
        function == "run_of_any"
        and tokens.join(closing - 3, closing).replace(" ", "") == f"({loop.variable})"
    ):
        last = closing - 4  # the function's name
    elif tokens.text(last) != loop.variable:
        return
    if tokens.text(closing + 1) in _ASSIGNMENTS:
        return
    if any(tokens.text(k) == loop.variable for k in range(opening, last)):
        return
    if tokens.text(name - 1) in (".", "->", "::"):
        return
    if last == opening + 1:
        tokens.overwrite(opening, ")[")
    elif tokens.text(last - 1) == "+":
        tokens.overwrite(opening, " + (")
        tokens.overwrite(last - 1, "))[")
    else:
        return
    tokens.overwrite(name, f"::softmetal::{function}<({loop.bound})>({tokens.text(name)}")
