"""Member functions qualified with address spaces: `int get() const device`.

To clang a member function works on an object in any space, so the qualifier goes; which spaces a function was
written for stays in an annotation, for the rules. Of overloads that differ in nothing but the space, one with
the same body as another goes; where bodies differ, each takes a tag of the object's space, and so do the calls.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from .lexer import TokenList, TranslationError
from .types import ADDRESS_SPACES

_SPECIFIERS = {"const", "volatile", *ADDRESS_SPACES}
_SMALLEST = {"{", ";", "}"}


@dataclass
class Member:
    name: str
    class_body: int  # the brace that opens its class, or -1
    begin: int
    parameters: tuple[int, int]
    end: int  # its closing brace or semicolon
    spaces: list[str]
    signature: str
    body: str


def translate_members(tokens: TokenList, *, annotate: bool = True) -> None:
    overloads: dict[tuple[int, str], list[Member]] = defaultdict(list)
    for member in _members(tokens):
        overloads[member.class_body, member.signature].append(member)
    tagged: set[str] = set()
    for members in overloads.values():
        bodies = {member.body for member in members}
        if len(bodies) > 1:
            _tag(tokens, members)
            tagged.add(members[0].name)
            continue
        spaces = sorted({space for member in members for space in member.spaces})
        for member in members[1:]:
            tokens.blank(_with_template(tokens, member.begin), member.end + 1)
        if annotate:
            tokens[members[0].begin].before += f'__attribute__((annotate("softmetal: {" ".join(spaces)}"))) '
    if tagged:
        _tag_calls(tokens, tagged)


# ---- reading -------------------------------------------------------------------------------------


def _members(tokens: TokenList) -> list[Member]:
    """Every member function with a qualifier; the qualifiers are blanked."""
    found = []
    enclosing: list[int] = []
    i = 0
    while i < len(tokens):
        text = tokens.text(i)
        if tokens.kind(i) == "op" and text == "{":
            enclosing.append(i)
        elif tokens.kind(i) == "op" and text == "}" and enclosing:
            enclosing.pop()
        elif text == "(" and tokens.kind(i) == "op":
            close = tokens.closing(i)
            qualifiers = _qualifiers(tokens, close)
            if any(tokens.text(q) in ADDRESS_SPACES for q in qualifiers):
                found.append(_member(tokens, i, close, qualifiers, enclosing[-1] if enclosing else -1))
        i += 1
    return found


def _qualifiers(tokens: TokenList, close: int) -> list[int]:
    """The words between a parameter list and what follows a declarator; empty if it is something else."""
    words, i = [], tokens.next(close)
    while tokens.kind(i) == "name" and tokens.text(i) in _SPECIFIERS:
        words.append(i)
        i = tokens.next(i)
    return words if tokens.text(i) in ("{", ";", ":", "=") else []


def _member(tokens: TokenList, opening: int, close: int, qualifiers: list[int], class_body: int) -> Member:
    spaces = [tokens.text(q) for q in qualifiers if tokens.text(q) in ADDRESS_SPACES]
    for q in qualifiers:
        if tokens.text(q) in ADDRESS_SPACES:
            tokens.blank(q, q + 1)
    begin = _begin(tokens, opening)
    end = tokens.next(close)
    while tokens.text(end) not in ("{", ";"):
        end = tokens.closing(end) + 1 if tokens.text(end) == "(" else end + 1
    body = tokens.join(end, tokens.closing(end) + 1) if tokens.text(end) == "{" else "declared"
    end = tokens.closing(end) if tokens.text(end) == "{" else end
    name = tokens.previous(opening)
    is_const = any(tokens.text(q) == "const" for q in qualifiers)
    signature = f"{tokens.join(begin, close + 1)} {is_const}"
    return Member(tokens.text(name), class_body, begin, (opening, close), end, spaces, signature, body)


def _begin(tokens: TokenList, opening: int) -> int:
    """First token of the member's declaration."""
    i = opening
    while True:
        before = i - 1
        text = tokens.text(before)
        starts = before < 0 or (tokens.kind(before) == "op" and text in _SMALLEST)
        if starts or (text == ":" and tokens.text(before - 1) in ("public", "private", "protected")):
            while tokens.text(i) == "template":
                i = tokens.closing_angle(i + 1) + 1
            return i
        i = before


def _with_template(tokens: TokenList, begin: int) -> int:
    """`begin`, or the start of the template parameter list before it."""
    i = begin - 1
    while i >= 0 and not (tokens.kind(i) == "op" and tokens.text(i) in _SMALLEST | {":"}):
        i -= 1
    return i + 1 if tokens.text(i + 1) == "template" else begin


# ---- overloads whose bodies differ ---------------------------------------------------------------


def _tag(tokens: TokenList, members: list[Member]) -> None:
    for member in members:
        if len(member.spaces) != 1 or tokens.text(member.parameters[0] - 1) != member.name:
            raise TranslationError(
                tokens[member.begin].where,
                f"'{member.name}' has overloads for several address spaces that do different things, which "
                "is supported for named member functions only",
            )
        tag = f"::softmetal::in_space_tag<::softmetal::space::{member.spaces[0]}>"
        opening, close = member.parameters
        tokens[opening].after += tag + ("" if tokens.next(opening) == close else ", ")


def _tag_calls(tokens: TokenList, names: set[str]) -> None:
    for i, token in enumerate(tokens.tokens):
        if token.kind != "name" or token.text not in names or tokens.text(i + 1) != "(":
            continue
        if tokens.text(i - 1) in (".", "->"):
            begin = _operand_begin(tokens, i - 2)
            operand = tokens.join(begin, i - 1)
            operand = f"*({operand})" if tokens.text(i - 1) == "->" else operand
            comma = "" if tokens.closing(i + 1) == i + 2 else ", "
            tokens[i + 1].after += f"::softmetal::tag_of<decltype(({operand}))>{{}}{comma}"


def _operand_begin(tokens: TokenList, last: int) -> int:
    """Start of the postfix expression that ends at `last`."""
    i = last
    while True:
        if tokens.text(i) in (")", "]"):
            opening = next(k for k in range(i, -1, -1) if tokens.text(k) in "([" and _closes(tokens, k, i))
            before = tokens.previous(opening)
            if tokens.kind(before) != "name" and tokens.text(before) not in (")", "]"):
                return opening
            i = before
            continue
        before = tokens.previous(i)
        if tokens.text(before) in (".", "->", "::"):
            i = tokens.previous(before)
            continue
        return i


def _closes(tokens: TokenList, opening: int, close: int) -> bool:
    return tokens.kind(opening) == "op" and tokens.text(opening) != "" and tokens.closing(opening) == close
