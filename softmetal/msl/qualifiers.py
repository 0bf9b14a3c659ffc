"""Address spaces and attributes: `device` ... become clang's opencl_* type attributes, and what C++
cannot express is reshaped.
"""

from __future__ import annotations

from .lexer import TokenList
from .structure import Outline

_MACROS = {
    "device": "SOFTMETAL_DEVICE",
    "threadgroup": "SOFTMETAL_THREADGROUP",
    "constant": "SOFTMETAL_CONSTANT",
}
_SPACES = ("device", "threadgroup", "constant", "thread")


def drop_attributes(tokens: TokenList) -> None:
    """The [[...]] that no earlier pass used up."""
    i = 0
    while i < len(tokens):
        if tokens.is_attribute(i) and tokens.kind(i) == "op":
            close = tokens.closing(i)
            tokens.blank(i, close + 1)
            i = close
        i += 1


def drop_qualified_members(tokens: TokenList) -> None:
    """Member functions qualified device, threadgroup or constant: outside of OpenCL, clang cannot overload on
    those. `thread` is the default."""
    i = 0
    while i < len(tokens):
        if tokens.kind(i) == "name" and tokens.text(i) in _SPACES:
            before, after = tokens.previous(i), tokens.next(i)
            if tokens.text(before) == "const":
                before = tokens.previous(before)
            if tokens.text(after) == "const":
                after = tokens.next(after)
            if tokens.text(before) == ")" and tokens.text(after) in ("{", ";", ":"):
                if tokens.text(i) == "thread":
                    tokens.blank(i, i + 1)
                else:
                    i = _drop_member(tokens, before, after)
        i += 1


def _drop_member(tokens: TokenList, parameters_end: int, body: int) -> int:
    begin = parameters_end
    while not _ends_member(tokens, begin - 1):
        begin -= 1
    end = body
    while tokens.text(end) not in ("{", ";"):
        end += 1
    if tokens.text(end) == "{":
        end = tokens.closing(end)
    tokens.blank(begin, end + 1)
    return end


def _ends_member(tokens: TokenList, i: int) -> bool:
    text = tokens.text(i)
    if text == ":":
        return tokens.text(i - 1) in ("public", "private", "protected")
    return tokens.kind(i) == "op" and text in (";", "{", "}")


def pointers_for_array_parameters(tokens: TokenList, outline: Outline) -> None:
    """`constant T s[2]` as a parameter is a pointer to constant memory; clang would apply the address
    space to the pointer.
    """
    for function in outline.functions:
        for begin, end in tokens.split(function.parameters[0] + 1, function.parameters[1]):
            bracket = next((i for i in range(begin, end) if tokens.text(i) == "["), -1)
            words = {tokens.text(i) for i in range(begin, end)}
            if bracket <= begin or not words & set(_MACROS) or words & {"*", "&"}:
                continue
            tokens[bracket - 1].before += "*"
            tokens.blank(bracket, tokens.closing(bracket) + 1)


def translate_address_spaces(tokens: TokenList) -> None:
    for i, token in enumerate(tokens.tokens):
        if token.kind != "name":
            continue
        if token.text in _MACROS:
            token.text = _MACROS[token.text]
        elif token.text == "thread":
            tokens.blank(i, i + 1)
