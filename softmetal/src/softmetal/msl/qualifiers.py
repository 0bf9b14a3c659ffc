"""Address spaces and attributes: `device` and the others become clang's opencl_* type attributes;
declarations that C++ cannot express are rewritten.
"""

from __future__ import annotations

from .language import Language
from .lexer import TokenList
from .structure import Outline

_MACROS = {
    "device": "SOFTMETAL_DEVICE",
    "threadgroup": "SOFTMETAL_THREADGROUP",
    "constant": "SOFTMETAL_CONSTANT",
}
_SPACES = ("device", "threadgroup", "constant", "thread")


def drop_attributes(tokens: TokenList) -> None:
    """Blanks the [[...]] that no earlier pass used."""
    i = 0
    while i < len(tokens):
        if tokens.is_attribute(i) and tokens.kind(i) == "op":
            close = tokens.closing(i)
            tokens.blank(i, close + 1)
            i = close
        i += 1


def host_text(tokens: TokenList, begin: int, end: int) -> str:
    """The text of join() as C++, for a pass that repeats it elsewhere."""
    parts = []
    for i in range(begin, end):
        text = tokens.join(i, i + 1)
        parts.append("" if text == "thread" else _MACROS.get(text, text))
    return " ".join(parts)


def pointers_for_array_parameters(tokens: TokenList, outline: Outline) -> None:
    """`constant T s[2]` as a parameter is a pointer to constant memory, `constant T s[2][3]` one to arrays;
    clang would apply the address space to the pointer.
    """
    for function in outline.functions:
        for begin, end in tokens.split(function.parameters[0] + 1, function.parameters[1]):
            bracket = next((i for i in range(begin, end) if tokens.text(i) == "["), -1)
            words = {tokens.text(i) for i in range(begin, end)}
            is_array = bracket > begin and not tokens.is_attribute(bracket)
            if not is_array or not words & set(_MACROS) or words & {"*", "&"}:
                continue
            close = tokens.closing(bracket)
            is_nested = tokens.text(close + 1) == "["
            tokens[bracket - 1].before += "(*" if is_nested else "*"
            tokens[bracket - 1].after += ")" if is_nested else ""
            tokens.blank(bracket, close + 1)


def translate_address_spaces(tokens: TokenList, language: Language) -> None:
    """Keeps `thread` as a word for the rules if omitting it would mean another space."""
    for i, token in enumerate(tokens.tokens):
        if token.kind != "name":
            continue
        if token.text == "coherent" and tokens.text(i + 1) in ("(", *_SPACES):  # all memory is
            tokens.blank(i, tokens.closing(i + 1) + 1 if tokens.text(i + 1) == "(" else i + 1)
            continue
        if token.text in _MACROS:
            tokens.put(i, _MACROS[token.text])
        elif token.text == "object_data":  # no kernel has any
            tokens.blank(i, i + 1)
        elif token.text == "thread" and language.has_generic_pointers:
            tokens.put(i, "SOFTMETAL_THREAD")
        elif token.text == "thread":
            tokens.blank(i, i + 1)
