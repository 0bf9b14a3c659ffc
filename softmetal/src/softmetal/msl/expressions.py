"""Translates expressions with a different meaning in C++: vector constructors, C-style casts to vectors and
pointers, floating-point literals.
"""

from __future__ import annotations

import re

from .comparisons import Operands
from .lexer import TokenList
from .structure import Outline
from .types import ADDRESS_SPACES, PACKED_VECTORS, VECTORS

_UNSUFFIXED_FLOAT = re.compile(r"(\d+\.\d*|\.\d+|\d+)([eE][+-]?\d+)?")
_HALF = re.compile(r"((\d+\.\d*|\.\d+|\d+)([eE][+-]?\d+)?)[hH]")
_BFLOAT = re.compile(r"((\d+\.\d*|\.\d+|\d+)([eE][+-]?\d+)?)(bf|BF)")
_EXPRESSION_KEYWORDS = {"return", "case", "else", "do"}
# clang has no conversion between these two, so they are converted like vectors.
_SIXTEEN_BITS = {"half", "bfloat", "bfloat16_t"}


def translate_literals(tokens: TokenList) -> None:
    """MSL has no double: `1.0` is a float; `1.0h` is a half, `1.0bf` a bfloat."""
    for i, token in enumerate(tokens.tokens):
        if token.kind != "number":
            continue
        text = token.text.replace("'", "")
        if match := _HALF.fullmatch(text):
            tokens.put(i, f"half({_as_float(match.group(1))})")
        elif match := _BFLOAT.fullmatch(text):
            tokens.put(i, f"bfloat({_as_float(match.group(1))})")
        elif _UNSUFFIXED_FLOAT.fullmatch(text) and not text.isdigit():
            tokens.put(i, token.text + "f")


def translate_vectors_of_bool(tokens: TokenList) -> None:
    """Replaces `vec<bool, N>` with the vector of bool of host/types.h, like bool4."""
    for i, token in enumerate(tokens.tokens):
        if token.text == "bool" and tokens.text(i - 1) == "<" and tokens.text(i - 2) == "vec":
            tokens.overwrite(i, "::softmetal::Boolean")


def _as_float(text: str) -> str:
    return f"{text}.0f" if text.isdigit() else f"{text}f"


class ExpressionPass:
    def __init__(self, tokens: TokenList, outline: Outline) -> None:
        self.tokens = tokens
        self.outline = outline
        self.operands = Operands(tokens, outline)
        self.in_body = bytearray(len(tokens) + 1)
        for function in outline.functions:
            if function.body is not None:
                begin, end = function.body
                self.in_body[begin:end] = b"\1" * (end - begin)

    def run(self) -> None:
        t = self.tokens
        for i in range(len(t)):
            kind, text = t.kind(i), t.text(i)
            if kind == "name":
                if text == "static_cast" and t.text(i + 1) == "<":
                    self.static_cast(i)
                elif self.names_vector(i):
                    self.constructor(i)
            elif kind == "op" and text == "(":
                self.c_style_cast(i)

    # ---- types -----------------------------------------------------------------------------------

    def names_vector(self, i: int) -> bool:
        """Whether the name at `i` is, or may be, a vector's type."""
        text = self.tokens.text(i)
        is_template = text == "vec" and self.tokens.text(i + 1) == "<"
        is_vector = text in VECTORS or text in PACKED_VECTORS or text in _SIXTEEN_BITS
        return is_template or is_vector or self.outline.names_type(text, i)

    def type_end(self, i: int) -> int:
        """Index after the (template) type name at `i`."""
        if self.tokens.text(i + 1) == "<":
            return self.tokens.closing_angle(i + 1) + 1
        return i + 1

    def qualified_begin(self, i: int) -> int:
        """Start of `metal::float4` whose last name is at `i`."""
        t = self.tokens
        if t.text(i - 1) == "::":
            i -= 1
            if t.text(i - 1) == "metal":
                i -= 1
                if t.text(i - 1) == "::":
                    i -= 1
        return i

    # ---- constructors ----------------------------------------------------------------------------

    def constructor(self, i: int) -> None:
        """float4(a, b) is a call; float4 v(a, b) a declaration with an initialiser."""
        t = self.tokens
        end = self.type_end(i)
        if end <= i or not self.in_scope_of_expressions(i):
            return
        begin = self.qualified_begin(i)
        if t.text(end) == "(" and self.may_start_expression(begin):
            t[begin].before += "::softmetal::make<"
            t[end - 1].after += ">"
        elif t.kind(end) == "name" and self.in_body[i]:
            self.initialised_declarators(t.join(begin, end), end)

    def in_scope_of_expressions(self, i: int) -> bool:
        return self.tokens.text(i - 1) not in ("operator", "~", "typename", "class", "struct", ".", "->")

    def may_start_expression(self, begin: int) -> bool:
        """Whether an expression, not a declarator, can follow the preceding tokens."""
        previous = self.tokens[begin - 1]
        if previous.kind == "name":
            return previous.text in _EXPRESSION_KEYWORDS
        return previous.kind in ("op", "raw")

    def initialised_declarators(self, type_text: str, i: int) -> None:
        """float4 v(a, b), w;"""
        t = self.tokens
        while t.kind(i) == "name":
            end = i + 1
            while t.text(end) not in (",", ";", "{", ")", ""):
                end = t.closing(end) + 1 if t.text(end) in ("(", "[") else end + 1
            if t.text(end) not in (",", ";"):
                return
            if t.text(i + 1) == "(" and t.closing(i + 1) == end - 1:
                t[i].after += f" = ::softmetal::make<{type_text}>"
            i = end + 1 if t.text(end) == "," else len(t)

    # ---- casts -----------------------------------------------------------------------------------

    def static_cast(self, i: int) -> None:
        t = self.tokens
        close = t.closing_angle(i + 1)
        if self.may_be_vector(i + 2, close):
            t.overwrite(i, "::softmetal::convert")

    def last_name(self, begin: int, end: int) -> int:
        """Index of X in [begin, end) = `metal::X` or `X<...>`, or -1 if the range is anything else."""
        t, i = self.tokens, begin
        while i < end and (t.text(i) in ("::", "metal", "const", "thread")):
            i += 1
        return i if i < end and t.kind(i) == "name" and self.type_end(i) == end else -1

    def c_style_cast(self, i: int) -> None:
        t = self.tokens
        close = t.closing(i)
        if not self.may_start_cast(i) or not self.tokens.starts_operand(close + 1):
            return
        last = self.operands.unary_end(close + 1)
        if self.is_pointer_type(i + 1, close):
            space = next(t.text(k) for k in range(close, i, -1) if t.text(k) in ADDRESS_SPACES)
            t[close].after += f"::softmetal::in_space<::softmetal::space::{space}>("
            t[last].after += ")"
        elif self.may_be_vector(i + 1, close):
            t.overwrite(i, "::softmetal::convert<")
            t.overwrite(close, ">(")
            t[last].after += ")"

    def may_start_cast(self, i: int) -> bool:
        previous = self.tokens[i - 1]
        if previous.kind == "name":
            return previous.text in _EXPRESSION_KEYWORDS
        return previous.text not in (")", "]", ">") or previous.kind == "raw"

    def is_pointer_type(self, begin: int, end: int) -> bool:
        """`device T*`, `const threadgroup vec<T, 4>*`: names an address space and ends with '*'."""
        t = self.tokens
        if t.text(end - 1) != "*":
            return False
        return any(t.kind(i) == "name" and t.text(i) in ADDRESS_SPACES for i in range(begin, end))

    def may_be_vector(self, begin: int, end: int) -> bool:
        name = self.last_name(begin, end)
        return name >= 0 and self.names_vector(name)
