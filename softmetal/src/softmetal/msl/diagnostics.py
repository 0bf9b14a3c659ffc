"""clang's messages about the translated program, in terms of the .metal source."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from .language import Language

# Messages have no columns or excerpts, which would show translated text. Warnings are off, except ones that
# clang treats as errors and ones about code that Apple's compiler refuses: C++ newer than C++20 (it only
# warns about older extensions) and variable length arrays.
FLAGS = [
    "-fno-caret-diagnostics", "-fno-show-column", "-fno-diagnostics-show-option", "-fno-elide-type",
    "-fno-diagnostics-fixit-info", "-Wno-everything", "-Wc++11-narrowing", "-Waddress-of-temporary",
    "-Wenum-constexpr-conversion", "-Wreserved-user-defined-literal", "-Winvalid-constexpr",
    "-Wc++2b-extensions", "-Wvla-extension",
]  # fmt: skip
_MESSAGE = re.compile(
    r"^(?P<file>[^\n:]+):(?P<line>\d+): (?P<severity>fatal error|error|warning|note): (?P<text>.*)$"
)
# From passes over LLVM's code (passes/recursion.cpp): clang puts the severity before their text.
_MESSAGE_OF_PASS = re.compile(r"^error: ([^\n:]+:\d+): ")
_HOST = str(Path(__file__).parent / "host")  # clang names common/ as host/../common/
_SPACES = {"__global_device": "device", "__local": "threadgroup", "__global_host": "constant"}
_MOST_MESSAGES = 20
_LONGEST_EXCERPT = 160
SourceLine = Callable[[str, int], str]
Message = re.Match[str]


def errors(stderr: str) -> list[list[Message]]:
    """clang's errors, each followed by its notes."""
    blocks: list[list[Message]] = []
    for line in stderr.splitlines():
        match = _MESSAGE.match(_MESSAGE_OF_PASS.sub(r"\1: error: ", line))
        if match is None:
            continue
        if match["severity"] != "note":
            blocks.append([match])
        elif blocks:
            blocks[-1].append(match)
    return blocks


def readable(stderr: str, source_line: SourceLine, language: Language) -> str:
    """Returns errors with the location, the line of source and the instantiations, or ""."""
    blocks = errors(stderr)
    shown = [_block(block, source_line, language) for block in blocks[:_MOST_MESSAGES]]
    if len(blocks) > _MOST_MESSAGES:
        shown.append(f"... and {len(blocks) - _MOST_MESSAGES} more errors")
    return "\n".join(shown)


def _block(block: list[Message], source_line: SourceLine, language: Language) -> str:
    error, notes = block[0], [note for note in block[1:] if not _in_library(note)]
    place = error if not _in_library(error) else next(iter(notes), error)
    text = _metal_words(error["text"])
    if "extension" in text:
        text += f", and {language.spoken} is C++{language.cpp}"
    lines = [f"{place['file']}:{place['line']}: error: {text}", *_excerpt(place, source_line)]
    lines += [
        f"{note['file']}:{note['line']}: note: {_metal_words(note['text'])}"
        for note in notes
        if note is not place
    ]
    return "\n".join(lines)


def _in_library(message: Message) -> bool:
    # <scratch space>: names that a macro of the library pasted together
    return message["file"].startswith((_HOST, "<scratch space>"))


def _excerpt(place: Message, source_line: SourceLine) -> list[str]:
    line = source_line(place["file"], int(place["line"])).strip()
    return [f"    {line[:_LONGEST_EXCERPT]}"] if line else []


def _metal_words(text: str) -> str:
    text = re.sub(r"\b__(?:global_device|local|global_host)\b", lambda match: _SPACES[match.group()], text)
    text = text.replace("_Float16", "half").replace("__bf16", "bfloat")
    return re.sub(r"\b(?:metal::)?vec<(\w+), ([234])>", r"\1\2", text)
