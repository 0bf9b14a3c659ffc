"""Metal's attributes: checks where they are allowed, and annotates them for the rules (rules/kernels.cpp)."""

from __future__ import annotations

import re

from .lexer import TokenList, TranslationError
from .structure import Function, Outline

# Synonyms.
_ALIASES = {
    "thread_execution_width": "threads_per_simdgroup",
    "dispatch_simdgroups_per_threadgroup": "simdgroups_per_threadgroup",
    "dispatch_quadgroups_per_threadgroup": "quadgroups_per_threadgroup",
}
_RESOURCES = {"buffer", "threadgroup", "texture", "sampler"}
# Attributes that give the source of a kernel's parameter. Others, including unknown ones, do not.
_SOURCES = re.compile(
    r"buffer|threadgroup|texture|sampler|stage_in|payload|imageblock_data|grid_(origin|size)"
    r"|\w+_(in|per|index_in)_(grid|threadgroup|simdgroup|quadgroup)|thread_execution_width"
)
# Attributes of functions, which cannot apply to types.
_OF_FUNCTIONS = {
    *("kernel", "vertex", "fragment", "host_name", "visible", "stitchable", "early_fragment_tests", "patch"),
    *("max_total_threads_per_threadgroup", "mesh", "object", "user_annotation", "always_inline", "noinline"),
    *("noreturn", "gnu", "clang", "maybe_unused", "nodiscard", "unused", "deprecated"),
}


def check_attributes(tokens: TokenList, outline: Outline) -> None:
    host_names: dict[str, str] = {}
    for function in outline.functions:
        _check_after_parameters(tokens, function)
        if function.is_kernel:
            if function.scope == "class":
                raise TranslationError(
                    tokens[function.begin].where,
                    f"'{function.name}' is a member function, and a kernel cannot be one",
                )
            _check_parameters(tokens, function)
            if function.body is not None:
                _note_host_name(tokens, function.begin, function.parameters[0], host_names)
    for instantiation in outline.instantiations:
        _note_host_name(tokens, instantiation.begin, instantiation.end, host_names)


def annotate(tokens: TokenList, outline: Outline) -> None:
    _annotate_members(tokens)
    for function in outline.functions:
        if function.is_kernel:
            tokens[function.begin].after += _annotation("kernel")
        for begin, end in tokens.split(function.parameters[0] + 1, function.parameters[1]):
            for first, last in attributes(tokens, begin, end):
                place = _default_argument(tokens, begin, end)
                tokens[place - 1].after += _annotation(f"attribute {tokens.join(first, last)}")


def _annotate_members(tokens: TokenList) -> None:
    """The [[id(n)]] of argument buffers."""
    for i in range(len(tokens)):
        if not tokens.is_attribute(i) or tokens.text(i + 2) != "id" or tokens.text(i + 3) != "(":
            continue
        end = i
        while tokens.text(end) not in (";", "=", "{", ""):
            end = tokens.closing(end) + 1 if tokens.text(end) in ("(", "[") else end + 1
        tokens[end - 1].after += _annotation(f"id {tokens.join(i + 4, tokens.closing(i + 3))}")


def attributes(tokens: TokenList, begin: int, end: int) -> list[tuple[int, int]]:
    """The range of tokens of every attribute in [begin, end): `buffer(0)` of [[buffer(0), unused]]."""
    found, i = [], begin
    while i < end:
        if tokens.is_attribute(i):
            close = tokens.closing(i)
            found += tokens.split(i + 2, close - 1)
            i = close
        i += 1
    return found


def _annotation(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f' __attribute__((annotate("softmetal:{escaped}"))) '


def _default_argument(tokens: TokenList, begin: int, end: int) -> int:
    """The '=' of a parameter, or its end."""
    i = begin
    while i < end:
        text = tokens.text(i)
        if text == "=" and tokens.kind(i) == "op":
            return i
        i = tokens.closing(i) + 1 if tokens.kind(i) == "op" and text in "([{" else i + 1
    return end


def _check_after_parameters(tokens: TokenList, function: Function) -> None:
    after = function.parameters[1] + 1
    name = tokens.text(after + 2)
    if tokens.is_attribute(after) and name in _OF_FUNCTIONS:
        raise TranslationError(
            tokens[after].where,
            f"'{name}' after the parameters of '{function.name}' applies to its type: "
            "write it before the function",
        )


def _check_parameters(tokens: TokenList, function: Function) -> None:
    seen: dict[str, str] = {}
    for begin, end in tokens.split(function.parameters[0] + 1, function.parameters[1]):
        where = tokens[begin].where
        equals = _default_argument(tokens, begin, end)
        if equals < end:
            raise TranslationError(
                where,
                f"parameter '{tokens.join(begin, equals)}' of kernel '{function.name}' has a default "
                "argument: kernels cannot have any",
            )
        names = [tokens.text(first) for first, _ in attributes(tokens, begin, end)]
        sources = [name for name in names if _SOURCES.fullmatch(name)]
        if len(sources) > 1:
            raise TranslationError(
                where, f"a parameter of kernel '{function.name}' has both '{sources[0]}' and '{sources[1]}'"
            )
        for name in sources:
            if name in _RESOURCES:
                continue
            key = _ALIASES.get(name, name)
            if key in seen:
                raise TranslationError(
                    where,
                    f"kernel '{function.name}' cannot have parameters with '{seen[key]}' and '{name}' "
                    "attributes",
                )
            seen[key] = name


def _note_host_name(tokens: TokenList, begin: int, end: int, host_names: dict[str, str]) -> None:
    for first, last in attributes(tokens, begin, end):
        if tokens.text(first) != "host_name":
            continue
        name, where = tokens.join(first + 2, last - 1), tokens[first].where
        if name in host_names:
            raise TranslationError(
                where, f"two functions have the host_name {name}; the first is at {host_names[name]}"
            )
        host_names[name] = where
