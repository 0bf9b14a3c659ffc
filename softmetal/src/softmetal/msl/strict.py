"""Rules checked on tokens and the outline: code that Metal refuses and clang would accept as C++.

clang itself reports mixed address spaces and writes to constant memory as type errors; rules/,
passes/recursion.cpp and diagnostics.py have the rules that need clang's view of the program.
"""

from __future__ import annotations

import re

from .attributes import check_attributes
from .language import Language
from .lexer import TokenList, TranslationError
from .names import check_names
from .structure import Function, Outline
from .types import ADDRESS_SPACES, BUILTIN_TYPES

_FORBIDDEN = {
    "double": "Metal has no double; use float",
    "goto": "Metal has no goto",
    "try": "Metal has no exceptions",
    "catch": "Metal has no exceptions",
    "throw": "Metal has no exceptions",
    "new": "Metal has no new: memory comes from the kernel's arguments",
    "dynamic_cast": "Metal has no run-time type information",
    "typeid": "Metal has no run-time type information",
    "thread_local": "Metal has no thread_local; thread is an address space there",
    "virtual": "Metal has no virtual functions",
    "asm": "Metal has no inline assembly",
    "wchar_t": "Metal has no wide characters",
    "char16_t": "Metal has no wide characters",
    "char32_t": "Metal has no wide characters",
    "char8_t": "Metal has no char8_t: write char or uchar",
    "register": "Metal has no register storage class",
}
_LONG_DOUBLE = re.compile(r"(?!0[xX])[\d']*(\.|\d[eE]).*[lL]|0[xX].*[pP].*[lL]")
_DECLARATION_SPECIFIERS = {
    "const", "volatile", "static", "constexpr", "inline", "typename", "typedef", "struct",
    "friend", "mutable", "explicit",
}  # fmt: skip
_LAMBDA_CONTEXT = {"=", "(", ",", "{", ";", "}", "&&", "||", "?", ":", "!", "return"}


def check(tokens: TokenList, outline: Outline, language: Language) -> None:
    _check_words(tokens)
    check_names(tokens)
    check_attributes(tokens, outline)
    if not language.has_lambdas:
        _check_lambdas(tokens)
    _check_program_scope(tokens, outline)
    for function in outline.functions:
        if function.is_kernel:
            _check_kernel(tokens, function)
    if not language.has_generic_pointers:
        _PointerRule(tokens, outline).run()


def _check_words(tokens: TokenList) -> None:
    for i, token in enumerate(tokens.tokens):
        if token.kind == "number" and _LONG_DOUBLE.fullmatch(token.text):
            raise TranslationError(token.where, f"Metal has no long double: write {token.text[:-1]}")
        if token.kind != "name":
            continue
        if token.text in _FORBIDDEN and tokens.text(i - 1) not in (".", "->"):
            raise TranslationError(token.where, _FORBIDDEN[token.text])
        if token.text == "delete" and tokens.text(i - 1) != "=":
            raise TranslationError(token.where, "Metal has no delete")
        if token.text == "std" and tokens.text(i + 1) == "::":
            raise TranslationError(
                token.where, "Metal has no namespace std; its library is in namespace metal"
            )


def _check_lambdas(tokens: TokenList) -> None:
    for i, token in enumerate(tokens.tokens):
        if token.text != "[" or tokens.is_attribute(i) or tokens.text(i - 1) not in _LAMBDA_CONTEXT:
            continue
        after = tokens.text(tokens.closing(i) + 1)
        if after in ("(", "{"):
            raise TranslationError(token.where, "Metal before 3.2 has no lambda expressions")


def _check_program_scope(tokens: TokenList, outline: Outline) -> None:
    for variable in outline.variables:
        words = {tokens.text(i) for i in range(variable.begin, variable.name_index)}
        if words >= {"constexpr", "sampler"}:
            continue
        if "constant" not in words:
            where = tokens[variable.name_index].where
            kind = "program-scope variable" if variable.scope == "namespace" else "static member"
            raise TranslationError(
                where, f"{kind} '{variable.name}' must reside in the constant address space"
            )


def _check_kernel(tokens: TokenList, function: Function) -> None:
    where = tokens[function.parameters[0] - 1].where
    words = {tokens.text(i) for i in range(function.begin, function.parameters[0])}
    if "void" not in words:
        raise TranslationError(where, f"kernel '{function.name}' must return void")
    if function.name == "main":
        raise TranslationError(where, "a kernel cannot be named 'main'")


class _PointerRule:
    """Every pointer and reference needs an address space."""

    def __init__(self, tokens: TokenList, outline: Outline) -> None:
        self.tokens = tokens
        self.builtin = BUILTIN_TYPES | {"auto"}
        self.types = self.builtin | outline.class_names | outline.type_names.keys()
        self.parameter_starts: set[int] = set()
        for function in outline.functions:
            ranges = tokens.split(function.parameters[0] + 1, function.parameters[1])
            self.parameter_starts.update(begin for begin, _ in ranges)

    def run(self) -> None:
        t = self.tokens
        for i, token in enumerate(t.tokens):
            if token.kind == "name" and token.text in self.types:
                star = self.skip_type(i)
                if t.kind(star) == "op" and t.text(star) in ("*", "&", "&&"):
                    self.check(i, star)
                if self.starts_declaration(self.first_word(i)):
                    self.check_later(self.first_word(i), star)
            elif token.text == "typedef" and token.kind == "name":
                body = next(k for k in range(i, len(t)) if t.text(k) in ("{", ";"))
                if t.text(body) == "{":
                    self.check_later(i, t.closing(body) + 1)

    def skip_type(self, i: int) -> int:
        """Index after the type name at `i`, its template arguments and the qualifiers that follow."""
        t = self.tokens
        after = i + 1
        if t.text(after) == "<":
            after = t.closing_angle(after) + 1
            if after == 0:
                return i
        while t.kind(after) == "name" and t.text(after) in ("const", "volatile", *ADDRESS_SPACES):
            after += 1
        return after

    def check(self, i: int, star: int) -> None:
        t = self.tokens
        first = self.first_word(i)
        if any(t.kind(k) == "name" and t.text(k) in ADDRESS_SPACES for k in range(first, star)):
            return
        name = star + 1
        while t.text(name) in ("const", "*"):
            name += 1
        is_declared = t.kind(name) == "name" and self.starts_declaration(first)
        is_cast = t.text(first - 1) == "(" and t.text(name) == ")" and self.is_cast(first - 1)
        is_template_argument = t.text(first - 1) in ("<", ",", "=") and t.text(name) in (">", ",")
        is_alias = t.text(first - 1) == "=" and t.text(first - 3) == "using"
        is_unnamed = first in self.parameter_starts and t.text(name) in (",", ")", "=", "[")
        if is_declared or is_cast or is_template_argument or is_alias or is_unnamed:
            self.refuse(star, t.join(first, star + 1))

    def check_later(self, first: int, begin: int) -> None:
        """Checks the declarators after the first: `T a, *p;`. Those of a typedef follow its class."""
        t, end = self.tokens, begin
        is_typedef = t.text(begin - 1) == "}"
        if first in self.parameter_starts or not (is_typedef or t.kind(begin) == "name"):
            return
        if t.text(begin) == "operator" or t.text(begin + 1) in ("(", "::", "<"):  # a function
            return
        body = next((k for k in range(first, begin) if t.text(k) == "{"), begin)
        if any(t.kind(k) == "name" and t.text(k) in ADDRESS_SPACES for k in range(first, body)):
            return
        while t.text(end) not in (";", "", ")", "}"):
            end = t.closing(end) + 1 if t.kind(end) == "op" and t.text(end) in "([{" else end + 1
        for start, _ in t.split(begin, end)[0 if is_typedef else 1 :]:
            if t.kind(start) == "op" and t.text(start) in ("*", "&"):
                self.refuse(start, f"{t.join(first, body)} {t.text(start)}")

    def refuse(self, star: int, words: str) -> None:
        what = "reference" if self.tokens.text(star).startswith("&") else "pointer"
        raise TranslationError(
            self.tokens[star].where,
            f"the {what} type '{words}' needs an address space: device, constant, threadgroup or thread",
        )

    def first_word(self, i: int) -> int:
        """Start of the declaration specifiers and qualified name that end at `i`."""
        t = self.tokens
        while True:
            previous = i - 1
            if t.text(previous) == "::":
                i = previous - 1 if t.kind(previous - 1) == "name" else previous
            elif t.kind(previous) == "name" and t.text(previous) in _DECLARATION_SPECIFIERS | ADDRESS_SPACES:
                i = previous
            else:
                return i

    def starts_declaration(self, first: int) -> bool:
        t = self.tokens
        if first in self.parameter_starts or t.text(first - 1) in (";", "{", "}"):
            return True
        return t.text(first - 1) == "(" and t.text(first - 2) == "for"

    def is_cast(self, parenthesis: int) -> bool:
        t = self.tokens
        before, after = t.kind(parenthesis - 1), t.kind(t.closing(parenthesis) + 1)
        return before == "op" and (
            after in ("name", "number") or t.text(t.closing(parenthesis) + 1) in ("(", "&")
        )
