"""Gives kernels that share a name different names, since no function calls a kernel. Instantiations get the
template arguments that C++ would deduce from their parameters.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection

from .attributes import attributes
from .lexer import TokenList, TranslationError
from .qualifiers import host_text
from .structure import Function, Instantiation, Outline
from .types import ADDRESS_SPACES, BUILTIN_TYPES

_LITERALS = {"true", "false"}


def separate_overloads(tokens: TokenList, outline: Outline) -> None:
    overloads: dict[str, list[Function]] = defaultdict(list)
    for function in outline.functions:
        if function.is_kernel and function.body is not None:
            if function.is_template and tokens.text(function.template_begin + 2) == ">":
                raise TranslationError(
                    tokens[function.begin].where,
                    f"an explicit specialisation of kernel '{function.name}' is not supported: give it "
                    "another name",
                )
            overloads[function.namespace + function.name].append(function)
    names = set(overloads)
    for qualified, functions in overloads.items():
        name = functions[0].name
        for instantiation in outline.instantiations:
            index = _designator(tokens, instantiation, name)
            if index < 0 or resolve(_path(tokens, index), instantiation.namespace, names) != qualified:
                continue
            is_listed = tokens.text(index + 1) == "<"
            if is_listed and len(functions) < 2:
                continue
            chosen = _chosen(tokens, functions, instantiation, index)
            own = _own_name(name, functions.index(chosen)) if len(functions) > 1 else name
            if is_listed and tokens.text(_opening(tokens, index)) == "(":
                tokens[instantiation.begin].before += _checked(tokens, index, own)
            own += "" if is_listed else f"<{_deduced(tokens, chosen, index)}>"
            for i in range(index, instantiation.end):  # in decltype(k<float>) k<float>, too
                if tokens.text(i) == name and tokens.text(i + 1) in ("<", "("):
                    tokens.put(i, own)
        for number, function in enumerate(functions if len(functions) > 1 else []):
            function.host_name = function.namespace + name
            function.name = _own_name(name, number)
            tokens.put(function.parameters[0] - 1, function.name)


def resolve(path: str, namespace: str, names: Collection[str]) -> str:
    """Returns the qualified name that `path` refers to within the namespace, or ""."""
    if path.startswith("::"):
        return path[2:] if path[2:] in names else ""
    scope = namespace
    while True:
        if scope + path in names:
            return scope + path
        if not scope:
            break
        scope = "".join(f"{part}::" for part in scope.split("::")[:-2])
    # Through an inline namespace or a using declaration.
    alike = [name for name in names if name.split("::")[-1] == path.split("::")[-1]]
    return alike[0] if len(alike) == 1 else ""


def _own_name(name: str, number: int) -> str:
    return f"{name}_{number}_overload"


def _designator(tokens: TokenList, instantiation: Instantiation, name: str) -> int:
    for i in range(instantiation.begin, instantiation.end):
        if tokens.text(i) == name and tokens.text(i + 1) in ("<", "("):
            return i
    return -1


def _path(tokens: TokenList, index: int) -> str:
    begin = index
    while tokens.text(begin - 1) == "::":
        begin -= 2 if tokens.kind(begin - 2) == "name" and tokens.text(begin - 2) != "void" else 1
    return "".join(tokens.text(i) for i in range(begin, index + 1))


def _chosen(
    tokens: TokenList, functions: list[Function], instantiation: Instantiation, index: int
) -> Function:
    """The only template that fits these arguments and parameters. If the text of the parameters fits more
    than one, only types could decide, and the program is refused.
    """
    is_listed, opening = tokens.text(index + 1) == "<", _opening(tokens, index)
    arguments = [tokens.join(*span) for span in tokens.split(index + 2, opening - 1)] if is_listed else []
    given = _parameters(tokens, opening) if tokens.text(opening) == "(" else None
    possible = [f for f in functions if f.is_template and _takes(tokens, f, arguments, given)]
    exact = [f for f in possible if given is not None and _match(tokens, f, arguments, given)]
    if len(exact or possible) == 1:
        return (exact or possible)[0]
    name, where = tokens.text(index), tokens[instantiation.begin].where
    if not possible:
        raise TranslationError(where, f"no overload of kernel '{name}' has these parameters")
    raise TranslationError(
        where,
        f"the text of the parameters does not tell which overload of kernel '{name}' this instantiates: "
        "give the kernels different names",
    )


def _opening(tokens: TokenList, index: int) -> int:
    """Returns the token after the name and its template arguments."""
    return tokens.closing_angle(index + 1) + 1 if tokens.text(index + 1) == "<" else index + 1


def _checked(tokens: TokenList, index: int, own: str) -> str:
    """Returns the instantiation in C++; clang refuses parameters that the overload does not have."""
    opening = _opening(tokens, index)
    parameters = ", ".join(
        host_text(tokens, begin, min([first - 2 for first, _ in attributes(tokens, begin, end)] + [end]))
        for begin, end in tokens.split(opening + 1, tokens.closing(opening))
    )
    path = _path(tokens, index).rpartition("::")
    return f"template void {path[0]}{path[1]}{own}{host_text(tokens, index + 1, opening)}({parameters}); "


def _heads(tokens: TokenList, function: Function) -> list[tuple[str, bool, bool]]:
    """Each template parameter: its name, whether it is a type, whether it needs no argument."""
    found = []
    for begin, end in tokens.split(function.template_begin + 2, function.begin - 1):
        equals = next((i for i in range(begin, end) if tokens.text(i) == "="), end)
        name = tokens.text(equals - 1) if equals - begin > 1 and tokens.kind(equals - 1) == "name" else ""
        is_optional = equals < end or "..." in (tokens.text(i) for i in range(begin, end))
        found.append((name, tokens.text(begin) in ("typename", "class"), is_optional))
    return found


def _takes(
    tokens: TokenList, function: Function, arguments: list[str], given: list[list[str]] | None
) -> bool:
    heads = _heads(tokens, function)
    own = _parameters(tokens, function.parameters[0])
    if len(arguments) > len(heads) or (given is not None and len(own) != len(given)):
        return False
    for argument, (_, is_type, _) in zip(arguments, heads, strict=False):
        is_value = argument[0].isdigit() or argument[0] in "-'(" or argument in _LITERALS
        if is_value if is_type else argument.split()[0] in BUILTIN_TYPES | ADDRESS_SPACES:
            return False
    words = {word for parameter in own for word in parameter}
    return all(
        is_optional or (given is not None and name in words)
        for name, _, is_optional in heads[len(arguments) :]
    )


def _deduced(tokens: TokenList, function: Function, index: int) -> str:
    match = _match(tokens, function, [], _parameters(tokens, index + 1))
    if match is None:
        name = function.name
        raise TranslationError(
            tokens[index].where,
            f"cannot deduce the template arguments of '{name}' from the text of the parameters: "
            f"write {name}<...>",
        )
    named = match.groupdict()
    return ", ".join(named[name] for name, _, _ in _heads(tokens, function) if name in named)


def _match(
    tokens: TokenList, function: Function, arguments: list[str], given: list[list[str]]
) -> re.Match[str] | None:
    """Matches the function's parameters with the given ones, word by word, with the template's arguments in
    place of its parameters. The groups are the deduced arguments.
    """
    heads = _heads(tokens, function)
    known = {name: argument for argument, (name, _, _) in zip(arguments, heads, strict=False)}
    deduced = {name for name, _, _ in heads[len(arguments) :] if name}
    seen: set[str] = set()

    def pattern(word: str) -> str:
        if word in known:
            return re.escape(" ".join(re.findall(r"\w+|\S", known[word])))
        if word not in deduced:
            return re.escape(word)
        is_first = word not in seen
        seen.add(word)
        return f"(?P<{word}>.+?)" if is_first else f"(?P={word})"

    own = _parameters(tokens, function.parameters[0])
    patterns = ",".join(" ".join(pattern(word) for word in parameter) for parameter in own)
    return re.fullmatch(patterns, ",".join(" ".join(words) for words in given))


def _parameters(tokens: TokenList, opening: int) -> list[list[str]]:
    """The words and marks of each parameter, qualifiers first, without its name and attributes."""
    found = []
    for begin, end in tokens.split(opening + 1, tokens.closing(opening)):
        hidden = {i for first, last in attributes(tokens, begin, end) for i in range(first - 2, last + 2)}
        words = [tokens.text(i) for i in range(begin, end) if i not in hidden]
        marks = [i for i, word in enumerate(words) if word in ("*", "&")]
        head = words[: marks[0]] if marks else words
        qualifiers = sorted({w for w in head if w == "const" or w in ADDRESS_SPACES})
        head = [w for w in head if w not in qualifiers]
        tail = words[marks[0] :] if marks else head
        is_named = len(tail) > 1 and re.fullmatch(r"[A-Za-z_]\w*", tail[-1]) and tail[-2] != "::"
        if is_named and tail[-1] not in BUILTIN_TYPES and tail[-1] != "const":
            tail = tail[:-1]
        found.append([*qualifiers, *head, *tail] if marks else [w for w in qualifiers if w != "const"] + tail)
    return found
