"""Refuses keywords of MSL that C++ does not have, and type names of its library, as a program's names."""

from __future__ import annotations

from .lexer import TokenList, TranslationError
from .types import ADDRESS_SPACES, BUILTIN_TYPES

_STAGES = {"kernel", "vertex", "fragment"}
_OTHER_SPACES = {"threadgroup_imageblock", "ray_data", "object_data"}
_SPACES = ADDRESS_SPACES | _OTHER_SPACES
# Typedefs and reserved words of Apple's metal_types, which is always included. A namespace can declare types
# with these names: torch's c10::metal has a `complex`.
_TYPES = {"complex", "imaginary", "quad", "llong", "ullong", "half", "bfloat", "sampler"}
# Tokens, other than names, that can follow an address space.
_AFTER_SPACE = {"*", "&", "&&", "::", "(", "[", "...", "<"}
_ENDS_MEMBER = {"{", ";", ":", "=", "->"}


def check_names(tokens: TokenList) -> None:
    attribute_end = -1
    for i, token in enumerate(tokens.tokens):
        if tokens.is_attribute(i):
            attribute_end = max(attribute_end, tokens.closing(i))
        if token.kind != "name" or i < attribute_end:
            continue
        if token.text in _STAGES and not _is_stage(tokens, i):
            raise _refusal(tokens, i, "a keyword of Metal")
        if token.text in _SPACES and not _is_space(tokens, i):
            raise _refusal(tokens, i, "a keyword of Metal")
        if token.text in _TYPES and _names_type(tokens, i) and not _is_in_namespace(tokens, i):
            raise _refusal(tokens, i, "a type of Metal")
        if token.text in BUILTIN_TYPES and _is_declared(tokens, i):
            raise _refusal(tokens, i, "a type of Metal")


def _refusal(tokens: TokenList, i: int, what: str) -> TranslationError:
    name = tokens.text(i)
    return TranslationError(
        tokens[i].where, f"'{name}' is {what} and cannot name anything: choose another name"
    )


def _is_stage(tokens: TokenList, i: int) -> bool:
    """`kernel` begins a declaration: a type follows it."""
    after, before = tokens.text(i + 1), tokens.text(i - 1)
    if before in (".", "->", "::", "struct", "class", "enum", "union", "namespace", "typename", "using"):
        return False
    return tokens.kind(i + 1) == "name" or after == "::" or tokens.is_attribute(i + 1)


def _is_space(tokens: TokenList, i: int) -> bool:
    """An address space precedes what it qualifies, or ends the head of a member function."""
    before, after = tokens.text(i - 1), tokens.text(i + 1)
    if before in (".", "->", "::", "struct", "class", "enum", "union", "namespace", "typename", "using"):
        return False
    if after in _ENDS_MEMBER:
        k = i - 1
        while tokens.text(k) in ("const", "volatile", "noexcept", *_SPACES):
            k -= 1
        return tokens.text(k) == ")" and (after != "=" or tokens.text(i + 2) in ("default", "delete"))
    if after == ">" or after == ",":  # the end of a template argument: S<float device>
        return tokens.kind(i - 1) == "name" and tokens.text(i - 1) not in ("return",) and after == ">"
    if after == ")":
        if before == "(" and tokens.text(i - 2) == "coherent":
            return True
        return tokens.text(i - 1) in (")", "const") or tokens.text(i - 1) in BUILTIN_TYPES
    return tokens.kind(i + 1) == "name" or after in _AFTER_SPACE - {"[", "...", "<"}


def _names_type(tokens: TokenList, i: int) -> bool:
    before = tokens.text(i - 1)
    if before in ("struct", "class", "union", "enum", "namespace"):
        return True
    if before == "using" and tokens.text(i + 1) == "=":
        return True
    return before == "}" and tokens.text(i + 1) == ";" and _closes_typedef(tokens, i - 1)


def _is_in_namespace(tokens: TokenList, i: int) -> bool:
    for k in range(i):
        if tokens.text(k) != "namespace" or tokens.text(k - 1) == "using":
            continue
        opening = next((j for j in range(k, i) if tokens.text(j) in ("{", ";", "=")), k)
        if tokens.text(opening) == "{" and tokens.closing(opening) > i:
            return True
    return False


def _closes_typedef(tokens: TokenList, brace: int) -> bool:
    opening = tokens.opening(brace)
    while opening > 0 and tokens.text(opening) not in (";", "}", "typedef"):
        opening -= 1
    return tokens.text(opening) == "typedef"


def _is_declared(tokens: TokenList, i: int) -> bool:
    """`float half = 1;`: a type used as a name."""
    before = tokens.text(i - 1)
    return before in BUILTIN_TYPES - {"unsigned", "signed", "long", "short", "const"} and tokens.text(
        i + 1
    ) in ("=", ";", "[")
