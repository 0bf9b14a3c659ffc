"""A kernel source as tokens that know their place: line, and the function or struct around them.

Comments, strings, attributes, compile-time assertions and preprocessor lines are left out, the bodies of
macros are not.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

KERNELS = Path(__file__).resolve().parents[2] / "csrc" / "kernels"

_TOKEN = re.compile(
    r"""
    (?P<skip> //[^\n]* | /\*.*?\*/ | \s+ | \\\n | "(?:\\.|[^"\\\n])*"
      | ^[ \t]*\#[ \t]*define[ \t]+\w+(?:\([^)\n]*\))?
      | ^[ \t]*\#(?:\\\n|[^\n])*
      | \[\[ .*? \]\])
  | (?P<number> \.?[0-9](?:[eEpP][+-]|[0-9A-Za-z_.])*)
  | (?P<name> [A-Za-z_]\w*)
  | (?P<op> ::|->|\+\+|--|<<=|>>=|<=|>=|==|!=|&&|\|\||[-+*/%&|^]=|<<|>>(?=\s)|.)
    """,
    re.MULTILINE | re.DOTALL | re.VERBOSE,
)
_ASSERTIONS = {"static_assert", "FATTN_CHECK_SIZE"}
_HEADS = {"if", "for", "while", "switch"}
_CLOSING = {"(": ")", "[": "]", "{": "}"}


@dataclass(frozen=True)
class Token:
    kind: str  # number, name, op
    text: str
    start: int
    end: int


class Source:
    """`index` arguments count tokens; offsets count characters of the text."""

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        self.text = text
        self.lines = text.split("\n")
        self.tokens = _without_assertions(
            [
                Token(match.lastgroup or "", match.group(), match.start(), match.end())
                for match in _TOKEN.finditer(text)
                if match.lastgroup != "skip"
            ]
        )

    def at(self, index: int) -> str:
        return self.tokens[index].text if 0 <= index < len(self.tokens) else ""

    def kind(self, index: int) -> str:
        return self.tokens[index].kind if 0 <= index < len(self.tokens) else ""

    def line_of(self, offset: int) -> int:
        """Counted from 1."""
        return self.text.count("\n", 0, offset) + 1

    @cached_property
    def partner(self) -> dict[int, int]:
        """The other bracket of a pair, both ways."""
        found: dict[int, int] = {}
        opened: list[int] = []
        for i, token in enumerate(self.tokens):
            if token.text in _CLOSING:
                opened.append(i)
            elif token.text in _CLOSING.values():
                found[i] = opened.pop()
                found[found[i]] = i
        return found

    @cached_property
    def places(self) -> list[str]:
        """For each token the function around it, with its struct; the struct, or nothing, outside of
        functions."""
        places: list[str] = []
        around: list[str] = []  # for each open brace: a name, or "" where it opens no function or struct
        for i in range(len(self.tokens)):
            if self.at(i) == "{":
                around.append(self._opened_by(i))
            places.append("::".join(name for name in around if name))
            if self.at(i) == "}":
                around.pop()
        return places

    def _opened_by(self, brace: int) -> str:
        before = brace - 1
        while self.at(before) in ("thread", "const"):
            before -= 1
        if self.at(before) == ")":
            name = self.partner[before] - 1
            for words in (1, 2):  # operator< and operator[]
                if self.at(name - words) == "operator":
                    return "".join(self.at(i) for i in range(name - words, name + 1))
            return self.at(name) if self.at(name) not in _HEADS else ""
        while self.kind(before) == "name" or self.at(before) in (",", ">"):
            if self.at(before) in ("struct", "enum"):
                return self.at(before + 1)
            before -= 1
        return ""

    def is_binary(self, index: int) -> bool:
        """Whether an operator is binary. In formatted sources only binary operators have space on both
        sides."""
        token = self.tokens[index]
        after = self.text[token.end : token.end + 1]
        return self.text[token.start - 1].isspace() and (after.isspace() or after == "\\")


def _without_assertions(tokens: list[Token]) -> list[Token]:
    kept: list[Token] = []
    depth = 0  # of brackets in an assertion
    for token in tokens:
        if depth == 0 and token.text not in _ASSERTIONS:
            kept.append(token)
            continue
        depth += (token.text in _ASSERTIONS) + (token.text == "(") - (token.text == ")")
        # The name of the assertion counts as a bracket until its own has closed.
        depth -= token.text == ")" and depth == 1
    return kept


@cache
def kernel_sources() -> tuple[Source, ...]:
    paths = sorted(KERNELS.glob("*/*"), key=lambda path: path.name)
    return tuple(Source(path.name, path.read_text()) for path in paths)
