"""Member functions qualified with address spaces: `int get() const device`.

In clang a member function works on objects in any address space, so the qualifier is removed; an
annotation keeps it for the rules. Overloads that differ only in the address space and have the same body
become one function, and a reference that each returns to its own space becomes a reference to any. If the
bodies differ, each overload takes a tag for the object's space, and so do the calls. In a function for
one space other than `thread`, `this` points to that space, and so do the data members: references with
their names hide them.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from .lexer import TokenList, TranslationError
from .structure import declaration_end
from .types import ADDRESS_SPACES

_SPECIFIERS = {"const", "volatile", *ADDRESS_SPACES}
_ACCESS = {"public", "private", "protected"}
_NO_DATA = {"static", "using", "typedef", "friend", "template", "operator", "static_assert", "enum"}


@dataclass
class Member:
    name: str
    class_body: int  # the brace that opens its class, or -1
    template_begin: int
    begin: int  # after template <...>
    parameters: tuple[int, int]
    body_begin: int  # its opening brace, or its semicolon
    end: int  # its closing brace or semicolon
    spaces: list[str]
    is_qualified: bool
    returned_space: str  # address space of a returned reference, if it is the function's own
    signature: str
    body: str


def translate_members(tokens: TokenList, *, annotate: bool = True) -> None:
    overloads: dict[tuple[int, str], list[Member]] = defaultdict(list)
    for member in _members(tokens):
        overloads[member.class_body, member.signature].append(member)
    tagged = {
        (members[0].class_body, members[0].name)
        for members in overloads.values()
        if len({member.body for member in members}) > 1
    }
    for members in overloads.values():
        if (members[0].class_body, members[0].name) in tagged:
            _tag(tokens, members, annotate)
            continue
        for member in members if len(members) > 1 else ():
            _blank_spaces(tokens, member)
        spaces = sorted({space for member in members for space in member.spaces})
        for member in members[1:]:
            tokens.blank(member.template_begin, member.end + 1)
        if annotate and any(member.is_qualified for member in members):
            tokens[members[0].begin].before += _annotation(spaces)
        _place_object(tokens, members[0], spaces)
    if tagged:
        _tag_calls(tokens, {name for _, name in tagged})


def _blank_spaces(tokens: TokenList, member: Member) -> None:
    """`device T&` of a function qualified with `device`: `T&`."""
    if member.returned_space:
        for i in range(member.begin, member.parameters[0]):
            if tokens.text(i) == member.returned_space:
                tokens.blank(i, i + 1)


def _annotation(spaces: list[str]) -> str:
    return f'__attribute__((annotate("softmetal:this {" ".join(spaces)}"))) '


# ---- reading -------------------------------------------------------------------------------------


def _members(tokens: TokenList) -> list[Member]:
    """The member functions of every class that qualifies one. Blanks the qualifiers."""
    candidates: dict[int, list[tuple[int, int, list[int]]]] = defaultdict(list)
    enclosing = [-1]
    for i, token in enumerate(tokens.tokens):
        if token.kind != "op":
            continue
        if token.text == "{":
            enclosing.append(i)
        elif token.text == "}":
            enclosing.pop()
        elif token.text == "(":
            close = tokens.closing(i)
            qualifiers = _qualifiers(tokens, close)
            if qualifiers is not None:
                candidates[enclosing[-1]].append((i, close, qualifiers))
    found = []
    for class_body, functions in candidates.items():
        if any(tokens.text(q) in ADDRESS_SPACES for _, _, qualifiers in functions for q in qualifiers):
            found += [_member(tokens, *function, class_body) for function in functions]
    return found


def _qualifiers(tokens: TokenList, close: int) -> list[int] | None:
    """The words between a parameter list and what follows a declarator; None if it is something else."""
    words, i = [], tokens.next(close)
    while tokens.kind(i) == "name" and tokens.text(i) in _SPECIFIERS:
        words.append(i)
        i = tokens.next(i)
    return words if tokens.text(i) in ("{", ";", ":", "=") else None


def _member(tokens: TokenList, opening: int, close: int, qualifiers: list[int], class_body: int) -> Member:
    spaces = [tokens.text(q) for q in qualifiers if tokens.text(q) in ADDRESS_SPACES]
    for q in qualifiers:
        if tokens.text(q) in ADDRESS_SPACES:
            tokens.blank(q, q + 1)
    template_begin = _start(tokens, opening)
    begin = _after_template(tokens, template_begin)
    end = tokens.next(close)
    while tokens.text(end) not in ("{", ";"):
        end = tokens.closing(end) + 1 if tokens.text(end) == "(" else end + 1
    body_begin = end
    body = tokens.join(end, tokens.closing(end) + 1) if tokens.text(end) == "{" else "declared"
    end = tokens.closing(end) if tokens.text(end) == "{" else end
    name = tokens.previous(opening)
    is_const = any(tokens.text(q) == "const" for q in qualifiers)
    returned = _returned_space(tokens, begin, opening, spaces or ["thread"])
    words = [tokens.text(i) for i in range(begin, name) if tokens.text(i) not in ("", returned)]
    kind = " ".join(word for word in words if word not in ADDRESS_SPACES)
    signature = f"{tokens.join(template_begin, begin)} {kind} {tokens.join(name, close + 1)} {is_const}"
    return Member(
        tokens.text(name),
        class_body,
        template_begin,
        begin,
        (opening, close),
        body_begin,
        end,
        spaces or ["thread"],
        bool(spaces),
        returned,
        signature,
        f"{' '.join(words)} {body}",
    )


def _returned_space(tokens: TokenList, begin: int, opening: int, spaces: list[str]) -> str:
    words = [tokens.text(i) for i in range(begin, opening)]
    declared = [word for word in words if word in ADDRESS_SPACES]
    is_reference = "&" in words[: words.index("operator")] if "operator" in words else "&" in words
    return declared[0] if is_reference and declared == spaces else ""


def _start(tokens: TokenList, i: int) -> int:
    """First token of the member's declaration that `i` is in, its template parameters included."""
    while i > 0 and not (tokens.kind(i - 1) == "op" and tokens.text(i - 1) in ("{", ";", "}")):
        if tokens.text(i - 1) == ":" and tokens.text(i - 2) in ("public", "private", "protected"):
            break
        i -= 1
    return i


def _after_template(tokens: TokenList, i: int) -> int:
    while tokens.text(i) == "template" and tokens.text(i + 1) == "<":
        i = tokens.closing_angle(i + 1) + 1
    return i


# ---- the object, in its space --------------------------------------------------------------------


def _place_object(tokens: TokenList, member: Member, spaces: list[str]) -> None:
    if spaces == ["thread"] or len(spaces) != 1 or tokens.text(member.body_begin) != "{":
        return
    this = f"::softmetal::this_in<::softmetal::space::{spaces[0]}>(this)"
    opening, close = member.parameters
    parameters = {tokens.text(i) for i in range(opening, close)}
    references = "".join(
        f"decltype(({this}->{name})) {name} = {this}->{name}; "
        for name in _data_members(tokens, member.class_body)
        if name not in parameters
    )
    for i in range(member.body_begin, member.end):
        if tokens.kind(i) == "name" and tokens.text(i) == "this":
            tokens.overwrite(i, this)
    # A nested block, because the function's variables may have the same names.
    tokens[member.body_begin].after += references + "{ "
    tokens[member.end].before += "} "


def _data_members(tokens: TokenList, class_body: int) -> list[str]:
    """Names of the class's own data members, in order; bit-fields have no address and are left out."""
    names = []
    i, end = class_body + 1, tokens.closing(class_body)
    while i < end:
        begin, i = i, declaration_end(tokens, i, end)
        while tokens.text(begin) in _ACCESS and tokens.text(begin + 1) == ":":
            begin += 2
        words = {tokens.text(k) for k in range(begin, i) if tokens.kind(k) == "name"}
        if tokens.text(i) == ";" and not words & _NO_DATA:
            names += [name for span in tokens.split(begin, i) if (name := _declared(tokens, *span))]
        i += 1
    return names


def _declared(tokens: TokenList, begin: int, end: int) -> str:
    """The name that a declarator without parentheses declares."""
    name = ""
    for i in range(begin, end):
        if tokens.kind(i) == "op" and tokens.text(i) in ("(", ":"):
            return ""
        if tokens.kind(i) == "op" and tokens.text(i) in ("[", "=", "{"):
            break
        if tokens.kind(i) == "name":
            name = tokens.text(i)
    return name


# ---- overloads whose bodies differ ---------------------------------------------------------------


def _tag(tokens: TokenList, members: list[Member], annotate: bool) -> None:
    for member in members:
        if len(member.spaces) != 1 or tokens.text(member.parameters[0] - 1) != member.name:
            raise TranslationError(
                tokens[member.begin].where,
                f"'{member.name}' has overloads for several address spaces that do different things, which "
                "is supported for named member functions only",
            )
        tag = f"::softmetal::in_space_tag<::softmetal::space::{member.spaces[0]}>"
        if annotate and member.is_qualified:
            tokens[member.begin].before += _annotation(member.spaces)
        _place_object(tokens, member, member.spaces)
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
            opening = tokens.opening(i)
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
