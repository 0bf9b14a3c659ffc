"""A kernel source as tokens that know their place.

Comments, strings, attributes, compile-time assertions and preprocessor lines are left out, the bodies of
macros are not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate
from pathlib import Path

KERNELS = Path(__file__).resolve().parents[2] / "csrc" / "kernels"

_TOKEN = re.compile(
    r"""
    (?P<skip> //[^\n]* | /\*.*?\*/ | \s+ | \\\n | "(?:\\.|[^"\\\n])*"
      | ^[ \t]*\#[ \t]*define[ \t]+\w+(?:\([^)\n]*\))?
      | ^[ \t]*\#(?:\\\n|[^\n])*
      | \[\[ .*? \]\] | (?:static_assert|FATTN_CHECK_\w+)\( [^;]* ;)
  | (?P<number> \.?[0-9](?:[eEpP][+-]|[0-9A-Za-z_.])*)
  | (?P<name> [A-Za-z_]\w*)
  | (?P<op> ::|->|\+\+|--|<<=|>>=|<=|>=|==|!=|&&|\|\||[-+*/%&|^]=|<<|>>(?=\s)|.)
    """,
    re.MULTILINE | re.DOTALL | re.VERBOSE,
)
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
        self.tokens = [
            Token(match.lastgroup or "", match.group(), match.start(), match.end())
            for match in _TOKEN.finditer(text)
            if match.lastgroup != "skip"
        ]

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

    def back_from(self, index: int) -> Iterator[int]:
        """The tokens before this one, without brackets that are closed before it and what is in them."""
        while index > 0:
            index -= 1
            if self.at(index) in _CLOSING.values():
                index = self.partner[index]
            else:
                yield index

    @cached_property
    def depths(self) -> list[int]:
        """For each token how many braces are open."""
        return list(accumulate((token.text == "{") - (token.text == "}") for token in self.tokens))

    def is_binary(self, index: int) -> bool:
        """Whether an operator is binary. In formatted sources only binary operators have space on both
        sides."""
        token = self.tokens[index]
        after = self.text[token.end : token.end + 1]
        return self.text[token.start - 1].isspace() and (after.isspace() or after == "\\")


@cache
def kernel_sources() -> tuple[Source, ...]:
    paths = sorted(KERNELS.glob("*/*"), key=lambda path: path.name)
    return tuple(Source(path.name, path.read_text()) for path in paths)
