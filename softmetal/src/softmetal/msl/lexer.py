"""Tokens of a preprocessed MSL program, and the edits that the translation passes make on them.

The list of tokens never changes length: a pass blanks tokens or overwrites their text. Indices therefore stay
valid, and lines keep their numbers: compiler errors, sanitizers and __builtin_LINE() name lines of the .metal
file.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

# '>' is always a separate token, because `>>` can close two template argument lists; rendering joins shifts
# again.
_TOKEN = re.compile(
    r"""
    (?P<directive>^[ \t]*\#[^\n]*(?:\n|$))
  | (?P<space>[ \t\r\n\f\v]+)
  | (?P<string>R"(?P<raw>[^()\\\s]*)\(.*?\)(?P=raw)"|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')
  | (?P<number>\.?[0-9](?:[eEpP][+-]|'?[0-9A-Za-z_.])*)
  | (?P<name>[A-Za-z_]\w*)
  | (?P<op>::|->\*|->|\+\+|--|<<=|<=|>=|==|!=|&&|\|\||[-+*/%&|^]=|<<|\.\.\.|.)
    """,
    re.MULTILINE | re.DOTALL | re.VERBOSE,
)
_LINE_MARKER = re.compile(r'\s*#\s*(?:line\s+)?(\d+)(?:\s+"((?:\\.|[^"\\])*)")?')
_NUMBERS = set(
    "bool char uchar short ushort int uint long ulong size_t uint16_t int16_t uint32_t int32_t".split()
)
_SPECIFIERS = {"static", "constexpr", "const", "constant", "inline"}
_BEYOND = 64  # how far past either end a pass may look
_CLOSING = {"(": ")", "[": "]", "{": "}", "<": ">"}


class TranslationError(Exception):
    """A program that Metal would refuse, or that this translator cannot read; `where` is file:line."""

    def __init__(self, where: str, message: str) -> None:
        super().__init__(f"{where}: error: {message}")


@dataclass(slots=True)
class Token:
    kind: str  # string, number, name, op; "gone" once blanked, "raw" once overwritten
    text: str
    prefix: str  # white space and line markers before it, never edited
    file: str
    line: int
    before: str = ""  # inserted by a pass
    after: str = ""

    @property
    def where(self) -> str:
        return f"{self.file}:{self.line}"


class TokenList:
    def __init__(self, text: str) -> None:
        self.tokens, self._tail = _lex(text)
        # What the passes ask most, 250,000 times per program: without a Python function in between.
        self._texts = [token.text for token in self.tokens] + [""] * _BEYOND
        self._kinds = [token.kind for token in self.tokens] + [""] * _BEYOND
        # The token's text and kind; empty past either end.
        self.text: Callable[[int], str] = self._texts.__getitem__
        self.kind: Callable[[int], str] = self._kinds.__getitem__
        self._closing = self._match_brackets()
        self._opening = {close: opening for opening, close in self._closing.items()}
        self._values = self._value_names()

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> Token:
        return self.tokens[index]

    def next(self, index: int) -> int:
        """The following token that was not blanked."""
        index += 1
        while self._kinds[index] == "gone":
            index += 1
        return index

    def previous(self, index: int) -> int:
        index -= 1
        while self._kinds[index] == "gone":
            index -= 1
        return index

    def closing(self, index: int) -> int:
        """The bracket that closes the one at `index`: ( [ {."""
        return self._closing[index]

    def opening(self, index: int) -> int:
        """The bracket that opens what the one at `index` closes."""
        return self._opening[index]

    def closing_angle(self, index: int) -> int:
        """The '>' that closes the template argument list opened at `index`, or -1."""
        i = index + 1
        while i < len(self.tokens):
            text = self.text(i)
            if self.kind(i) == "op":
                if text in "([{":
                    i = self.closing(i)
                elif text == "<" and self.may_open_angle(i):
                    close = self.closing_angle(i)
                    i = close if close > 0 else i
                elif text == ">":
                    return i
                elif text in ")]};":
                    return -1
            i += 1
        return -1

    def may_open_angle(self, index: int) -> bool:
        """Whether the '<' follows a name that may be a template's; otherwise it is a comparison."""
        before = self.previous(index)
        return (
            self.kind(before) != "number"
            and self.text(before) not in (")", "]")
            and (self.text(before) not in self._values)
        )

    def join(self, begin: int, end: int) -> str:
        """Source text of [begin, end) on one line."""
        parts: list[str] = []
        for token in self.tokens[begin:end]:
            if token.kind == "gone":
                continue
            if parts and token.prefix:
                parts.append(" ")
            parts.append(token.text)
        return "".join(parts)

    def blank(self, begin: int, end: int) -> None:
        for index in range(begin, min(end, len(self.tokens))):
            self.put(index, "", "gone")

    def overwrite(self, index: int, text: str) -> None:
        self.put(index, text, "raw")

    def put(self, index: int, text: str, kind: str | None = None) -> None:
        """Replaces the token's text, and its kind if given; nothing else does."""
        token = self.tokens[index]
        token.text = self._texts[index] = text
        if kind is not None:
            token.kind = self._kinds[index] = kind

    def render(self) -> str:
        parts: list[str] = []
        for token in self.tokens:
            # A blanked token leaves a space, or its neighbours could fuse.
            parts += (token.prefix, token.before, token.text if token.kind != "gone" else " ", token.after)
        return "".join(parts) + self._tail

    def split(self, begin: int, end: int, separator: str = ",") -> list[tuple[int, int]]:
        """Ranges between the separators that are outside of all brackets, template argument lists
        included.
        """
        ranges, start, i = [], begin, begin
        while i < end:
            text = self.text(i)
            if self.kind(i) == "op":
                if text in "([{":
                    i = self.closing(i)
                elif text == "<" and self.may_open_angle(i):
                    close = self.closing_angle(i)
                    i = close if close > 0 else i
                elif text == separator:
                    ranges.append((start, i))
                    start = i + 1
            i += 1
        if any(token.kind != "gone" for token in self.tokens[start:end]):
            ranges.append((start, end))
        return ranges

    def starts_operand(self, index: int) -> bool:
        """Whether the operand of a cast can start at `index`."""
        is_word = self.kind(index) in ("name", "number", "string", "raw")
        return is_word or self.text(index) in ("(", "-", "+", "*", "&", "!", "~", "::")

    def is_attribute(self, index: int) -> bool:
        """Whether [[ starts at `index`."""
        texts = self._texts
        return texts[index] == "[" == texts[index + 1] and not self.tokens[index + 1].prefix

    def _value_names(self) -> set[str]:
        """Names declared as numbers, after which `<` is a comparison: `int N`, but neither the function
        `int f(` nor the variable template `template <...> constexpr bool is_x`.
        """
        names = set()
        for i in range(1, len(self.tokens)):
            if self.kind(i) == "name" and self.text(i - 1) in _NUMBERS and self.text(i + 1) not in ("(", "<"):
                begin = i - 1
                while self.text(begin - 1) in _SPECIFIERS:
                    begin -= 1
                if self.text(begin - 1) != ">":
                    names.add(self.text(i))
        return names

    def _match_brackets(self) -> dict[int, int]:
        closing: dict[int, int] = {}
        stack: list[int] = []
        for i, token in enumerate(self.tokens):
            if token.kind != "op":
                continue
            if token.text in "([{":
                stack.append(i)
            elif token.text in ")]}":
                if not stack or _CLOSING[self.text(stack[-1])] != token.text:
                    raise TranslationError(token.where, f"'{token.text}' has no opening bracket")
                closing[stack.pop()] = i
        if stack:
            token = self.tokens[stack[-1]]
            raise TranslationError(token.where, f"'{token.text}' is not closed")
        return closing


def source_line(preprocessed: str, file: str, line: int) -> str:
    """The text of a line, for messages; empty if there is none."""
    current_file, current_line = "", 0
    for text in preprocessed.splitlines():
        marker = _LINE_MARKER.match(text)
        if marker:
            current_file, current_line = marker.group(2) or current_file, int(marker.group(1))
            continue
        if (current_file, current_line) == (file, line):
            return text
        current_line += 1
    return ""


def _lex(text: str) -> tuple[list[Token], str]:
    tokens: list[Token] = []
    prefix, file, line = "", "program_source", 1
    for match in _TOKEN.finditer(text):
        kind, piece = match.lastgroup or "", match.group()
        if kind == "directive":
            prefix += piece if prefix.endswith("\n") or not prefix else "\n" + piece
            marker = _LINE_MARKER.match(piece)
            if marker:
                line = int(marker.group(1))
                file = marker.group(2) if marker.group(2) is not None else file
            else:
                line += 1
            continue
        if kind == "space":
            prefix += piece
        else:
            tokens.append(Token(kind, piece, prefix, file, line))
            prefix = ""
        line += piece.count("\n")
    return tokens, prefix
