"""Conditional expressions whose arms are structs in different address spaces.

An example is `c ? shared[i] : table.first`. In Metal each arm is a copy; clang finds no type that both
convert to. An arm that names an object is cast to ::softmetal::arm_t: the struct without its address
space, unless the other arm names an object of the same type.
"""

from __future__ import annotations

from .lexer import TokenList

_ENDS = {";", ")", ",", "]", "}"}
_ASSIGNMENTS = {"=", "+=", "-=", "*=", "/=", "%=", "&=", "|=", "^=", "<<=", ">>=", "++", "--", "."}
_NO_OBJECTS = {"this", "true", "false", "nullptr"}


def translate_conditionals(tokens: TokenList) -> None:
    for i, token in enumerate(tokens.tokens):
        if token.kind != "op" or token.text != "?":
            continue
        colon = _colon(tokens, i)
        first, second = tokens.next(i), tokens.next(colon)
        end = _object_end(tokens, second)
        arms = [(first, colon)] if _object_end(tokens, first) == colon else []
        arms += [(second, end)] if end >= 0 and tokens.text(end) in _ENDS else []
        if colon < 0 or _is_place(tokens, i, end):
            continue
        types = [f"decltype(({tokens.join(*arm)}))" for arm in arms]
        for k, (begin, after) in enumerate(arms):
            other = types[1 - k] if len(arms) == 2 else "void"
            cast = f"static_cast<::softmetal::arm_t<{types[k]}, {other}>>"
            tokens[begin].before = f"{cast}({tokens[begin].before}"
            tokens[tokens.previous(after)].after += ")"


def _colon(tokens: TokenList, question: int) -> int:
    """The colon that belongs to the question mark, or -1."""
    nested, i = 0, tokens.next(question)
    while i < len(tokens) and tokens.text(i) not in (";", "}", ")", "]"):
        text = tokens.text(i)
        if tokens.kind(i) == "op" and text in ("(", "[", "{"):
            i = tokens.closing(i)
        elif text == ":" and nested == 0:
            return i
        nested += {"?": 1, ":": -1}.get(text, 0)
        i = tokens.next(i)
    return -1


def _object_end(tokens: TokenList, i: int) -> int:
    """The token after an expression of names, members and indices only; -1 for any other."""
    while tokens.text(i) == "*" and tokens.kind(i) == "op":
        i = tokens.next(i)
    if tokens.kind(i) != "name" or tokens.text(i) in _NO_OBJECTS:
        return -1
    while True:
        i = tokens.next(i)
        text = tokens.text(i)
        if text == "<":
            close = tokens.closing_angle(i)
            if close < 0 or tokens.text(tokens.next(close)) != "::":
                return -1
            i = close
        elif text == "[":
            i = tokens.closing(i)
        elif text in (".", "->", "::") and tokens.kind(tokens.next(i)) == "name":
            i = tokens.next(i)
        else:
            return i


def _is_place(tokens: TokenList, question: int, end: int) -> bool:
    """Whether the result is written, or a reference or pointer to it is taken."""
    if end >= 0 and tokens.text(end) == ")" and tokens.text(tokens.next(end)) in _ASSIGNMENTS:
        return True
    i, depth = tokens.previous(question), 0
    while i >= 0 and (depth or tokens.text(i) not in (";", "{", "}", "(", "=", ",")):
        depth += {")": 1, "]": 1, "(": -1, "[": -1}.get(tokens.text(i), 0)
        i = tokens.previous(i)
    if tokens.text(i) == "=":
        i = tokens.previous(i)
    return tokens.text(tokens.previous(i)) in ("&", "&&", "++", "--")
