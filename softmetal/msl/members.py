"""Member functions qualified with an address space: `float at(int i) const device;`.

In the mode that programs are translated for, `this` of one C++ function reaches memory of any kind, so the
qualifier goes and the rules (rules/address_spaces.cpp) are told which memory the function is for. Overloads
that differ in the qualifier only become one.
"""

from __future__ import annotations

from dataclasses import dataclass

from .lexer import TokenList
from .types import ADDRESS_SPACES


@dataclass
class Member:
    """A member function, from its template header or first specifier to its body's end."""

    begin: int
    parameters: tuple[int, int]  # its parentheses
    body: int  # its brace, semicolon, colon or equals sign
    qualifiers: list[int]  # tokens that name an address space

    def spaces(self, tokens: TokenList) -> list[str]:
        return [tokens.text(i) for i in self.qualifiers]


def translate_qualified_members(tokens: TokenList, *, annotated: bool = True) -> None:
    overloads: dict[tuple[int, str], list[Member]] = {}
    members = _members(tokens)
    classes = {scope for scope, member in members if member.qualifiers}
    for scope, member in members:
        if scope not in classes:
            continue
        overloads.setdefault((scope, _signature(tokens, member)), []).append(member)
    for alike in overloads.values():
        if any(member.qualifiers for member in alike):
            _merge(tokens, alike, annotated)


def _members(tokens: TokenList) -> list[tuple[int, Member]]:
    """Everything that reads like a function's head, with the brace it stands in."""
    found, scopes, opened = [], [-1], {}
    for i, token in enumerate(tokens.tokens):
        if token.kind != "op":
            continue
        if token.text == "{":
            scopes.append(i)
        elif token.text == "}":
            scopes.pop()
        elif token.text == "(":
            opened[tokens.closing(i)] = i
        elif token.text == ")" and tokens.kind(tokens.previous(opened[i])) in ("name", "op"):
            qualifiers, after = [], tokens.next(i)
            while tokens.text(after) in ("const", "noexcept", *ADDRESS_SPACES):
                if tokens.text(after) in ADDRESS_SPACES:
                    qualifiers.append(after)
                after = tokens.next(after)
            if tokens.text(after) in ("{", ";", ":", "="):
                found.append(
                    (scopes[-1], Member(_begin(tokens, opened[i]), (opened[i], i), after, qualifiers))
                )
    return found


def _begin(tokens: TokenList, i: int) -> int:
    while not _ends_member(tokens, i - 1):
        i -= 1
    return i


def _ends_member(tokens: TokenList, i: int) -> bool:
    text = tokens.text(i)
    if text == ":":
        return tokens.text(i - 1) in ("public", "private", "protected")
    return i < 0 or (tokens.kind(i) == "op" and text in (";", "{", "}"))


def _signature(tokens: TokenList, member: Member) -> str:
    """Name, template parameters, parameters and constness: what tells overloads apart besides the address
    space."""
    opening, closing = member.parameters
    operator = next((i for i in range(member.begin, opening) if tokens.text(i) == "operator"), None)
    name = operator if operator is not None else tokens.previous(opening)
    template = ""
    if tokens.text(member.begin) == "template":
        template = tokens.join(member.begin, tokens.closing_angle(member.begin + 1) + 1)
    is_const = any(tokens.text(i) == "const" for i in range(closing, member.body))
    return f"{template} {tokens.join(name, closing + 1)} {is_const}"


def _merge(tokens: TokenList, members: list[Member], annotated: bool) -> None:
    """One function for all, that of thread objects if there is one."""
    kept = next((m for m in members if m.spaces(tokens) in ([], ["thread"])), members[0])
    spaces = [space for member in members for space in member.spaces(tokens) or ["thread"]]
    for member in members:
        if member is not kept:
            tokens.blank(member.begin, _end(tokens, member.body) + 1)
    for i in kept.qualifiers:
        tokens.blank(i, i + 1)
    if annotated and tokens.text(kept.body) != "=":
        notes = "".join(f' __attribute__((annotate("softmetal:this {space}")))' for space in spaces)
        tokens[kept.body].before = notes + " " + tokens[kept.body].before


def _end(tokens: TokenList, i: int) -> int:
    while tokens.text(i) not in ("{", ";"):
        i = tokens.closing(i) + 1 if tokens.text(i) == "(" else i + 1
    return tokens.closing(i) if tokens.text(i) == "{" else i
