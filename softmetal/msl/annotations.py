"""What the rules (rules/) need to know and clang does not see: which functions are kernels, and the
attributes of parameters, as __attribute__((annotate("softmetal:..."))).
"""

from __future__ import annotations

from .lexer import TokenList
from .structure import Outline


def annotate(tokens: TokenList, outline: Outline) -> None:
    for function in outline.functions:
        if function.is_kernel:
            tokens[function.begin].before += _annotation("kernel")
        for begin, end in tokens.split(function.parameters[0] + 1, function.parameters[1]):
            for first, last in attributes(tokens, begin, end):
                tokens[end - 1].after += _annotation(f"attribute {tokens.join(first, last)}")


def _annotation(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f' __attribute__((annotate("softmetal:{escaped}"))) '


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
