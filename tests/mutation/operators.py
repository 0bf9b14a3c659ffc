"""The mutants of a kernel source: one small change each, of an operator, a constant, a condition, a call or a
statement."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from .source import Source, kernel_sources

_BINARY = {
    **{"+": ["-"], "-": ["+"], "*": ["/"], "/": ["*"], "%": ["/"]},
    **{"<": ["<=", ">="], "<=": ["<", ">"], ">": [">=", "<="], ">=": [">", "<"], "==": ["!="], "!=": ["=="]},
    **{"&&": ["||"], "||": ["&&"], "&": ["|"], "|": ["&"], "^": ["&"], "<<": [">>"], ">>": ["<<"]},
    **{"+=": ["-=", "="], "-=": ["+="], "*=": ["/=", "="], "/=": ["*="], "|=": ["=", "&="], "&=": ["|="]},
}
_NAMES = {
    **{"min": "max", "max": "min", "fmin": "fmax", "fmax": "fmin", "true": "false", "false": "true"},
    **{"simd_any": "simd_all", "simd_all": "simd_any", "simd_max": "simd_min", "simd_min": "simd_max"},
    "simd_sum": "simd_max",
    "simd_prefix_inclusive_sum": "simd_prefix_exclusive_sum",
    "simd_prefix_exclusive_sum": "simd_prefix_inclusive_sum",
    **{"exp2": "exp", "log": "log2", "INFINITY": "0.0f", "M_LOG2E_F": "1.0f", "M_LN2_F": "1.0f"},
}
_FLAG = re.compile(r"fc_\w+|k(?:Edge|Whole)")
_INTEGER = re.compile(r"(0x)?([0-9a-fA-F]+)([uUlL]*)")
_FLOAT = re.compile(r"([0-9.]+(?:[eE][-+]?[0-9]+)?)([fh]?)")
_NO_STATEMENT = {
    *("if", "else", "for", "while", "do", "return", "using", "typedef", "template", "namespace"),
    *("const", "constant", "constexpr", "device", "thread", "threadgroup", "volatile", "static", "inline"),
    *("struct", "enum", "unsigned", "private", "public", "_Pragma"),
}
_ASSIGNMENTS = ("=", "+=", "-=", "*=", "/=", "|=", "&=", "<<=", ">>=")


@dataclass(frozen=True)
class Key:
    """The identity of a mutant, which changes of other lines do not affect."""

    file: str
    line: str
    becomes: str
    nth: int = 1  # of the same change of the same line

    def __str__(self) -> str:
        again = f" ({self.nth})" if self.nth > 1 else ""
        return f"{self.file}{again}: {self.line} => {self.becomes}"


@dataclass(frozen=True)
class Mutant:
    key: Key
    first_line: int
    lines: tuple[str, ...]  # in place of as many lines from `first_line` on

    def apply(self, flat: str) -> str:
        """Changes a flattened kernel (tools/embed_kernels.py), if the file is part of it."""
        text = flat.split("\n")
        file, number = "", 0
        for i, line in enumerate(text):
            if marker := re.fullmatch(r'#line (\d+) "([^"]+)"', line):
                file, number = marker.group(2), int(marker.group(1))
                continue
            if file == self.key.file and 0 <= number - self.first_line < len(self.lines):
                text[i] = self.lines[number - self.first_line]
            number += 1
        return "\n".join(text)


@dataclass(frozen=True)
class _Edit:
    start: int
    end: int
    text: str


def all_mutants() -> list[Mutant]:
    return [mutant for source in kernel_sources() for mutant in mutants_of(source)]


def changed(file: str, old: str, new: str) -> Mutant:
    """A fault of our own: `new` in place of `old`, which the file has once."""
    (source,) = (source for source in kernel_sources() if source.name == file)
    if source.text.count(old) != 1:  # not an AssertionError, which would count as caught
        raise LookupError(f"{file} has {source.text.count(old)} times {old!r}")
    start = source.text.index(old)
    return _mutant(source, _Edit(start, start + len(old), new), Counter())


def mutants_of(source: Source) -> list[Mutant]:
    found = []
    seen: set[tuple[int, int, str]] = set()
    times: Counter[tuple[str, str]] = Counter()
    for edit in sorted(_edits(source), key=lambda e: (e.start, e.end, e.text)):
        if (edit.start, edit.end, edit.text) in seen:
            continue
        seen.add((edit.start, edit.end, edit.text))
        mutant = _mutant(source, edit, times)
        if mutant.key.line != mutant.key.becomes:
            found.append(mutant)
    return found


def _mutant(source: Source, edit: _Edit, times: Counter[tuple[str, str]]) -> Mutant:
    lost_lines = source.text.count("\n", edit.start, edit.end) - edit.text.count("\n")
    changed = source.text[: edit.start] + edit.text + "\n" * lost_lines + source.text[edit.end :]
    first, last = source.line_of(edit.start), source.line_of(edit.end)
    before, after = (text.split("\n")[first - 1 : last] for text in (source.text, changed))
    change = _code_of(before), _code_of(after)
    times[change] += 1
    return Mutant(Key(source.name, *change, times[change]), first, tuple(after))


def _code_of(lines: list[str]) -> str:
    code = (line.split("//")[0].rstrip("\\ ").strip() for line in lines)
    return " ".join(part for part in code if part)


def _edits(source: Source) -> Iterator[_Edit]:
    for i, token in enumerate(source.tokens):
        for text in _replacements(source, i):
            yield _Edit(token.start, token.end, text)
        yield from _negations(source, i)
        yield from _without_clamp(source, i)
        yield from _index_off_by_one(source, i)
        yield from _deletions(source, i)


def _replacements(source: Source, i: int) -> Iterator[str]:
    token = source.tokens[i]
    if token.kind == "number":
        others = list(_other_numbers(token.text))
        if _is_array_size(source, i):  # a longer array is the same
            others = others[1:] if source.at(i - 1) == "/" else others[:1]
        yield from others
    elif token.kind == "name":
        if token.text in _NAMES:
            yield _NAMES[token.text]
        if _FLAG.fullmatch(token.text) and source.depths[i] and source.at(i + 1) not in ("[", "="):
            # A flag that is a template parameter is declared where it follows its type.
            yield from ["!" + token.text] if source.at(i - 1) not in ("bool", "!") else []
    elif source.is_binary(i):
        yield from _BINARY.get(token.text, [])
    elif token.text in ("++", "--"):
        yield "--" if token.text == "++" else "++"
    elif token.text in ("!", "-", "~") and not source.text[token.end].isspace():
        yield ""


def _is_array_size(source: Source, i: int) -> bool:
    """Whether this is the size of a declared array."""
    opening = next((j for j in source.back_from(i) if source.at(j) in ("[", ";", "{")), -1)
    return source.at(opening) == "[" and _declares_array(source, opening)


def _other_numbers(text: str) -> Iterator[str]:
    if match := _INTEGER.fullmatch(text):
        prefix, digits, suffix = match.group(1) or "", match.group(2), match.group(3)
        value = int(digits, 16 if prefix else 10)
        for other in (value - 1, value + 1):
            if other >= 0:
                yield f"{hex(other) if prefix else other}{suffix}"
    elif match := _FLOAT.fullmatch(text):
        yield f"{float(match.group(1)) + 1}{match.group(2)}"


def _negations(source: Source, i: int) -> Iterator[_Edit]:
    if source.at(i) in ("if", "while"):
        opening = i + 1 + (source.at(i + 1) == "constexpr")
        begin, end = source.tokens[opening].end, source.tokens[source.partner[opening]].start
    elif source.at(i) == "?":
        before = ("(", "[", "{", ",", ";", "?", ":", "return", *_ASSIGNMENTS)
        first = next(j for j in source.back_from(i) if source.at(j) in before) + 1
        begin, end = source.tokens[first].start, source.tokens[i - 1].end
    else:
        return
    condition = source.text[begin:end]
    if not (_FLAG.fullmatch(condition) or _FLAG.fullmatch(condition.removeprefix("!"))):
        yield _Edit(begin, end, f"!({condition})")


def _without_clamp(source: Source, i: int) -> Iterator[_Edit]:
    if source.at(i) == "clamp":
        comma = i + 2
        while source.at(comma) != ",":
            comma = source.partner[comma] + 1 if source.at(comma) in ("(", "[") else comma + 1
        value = source.text[source.tokens[i + 1].end : source.tokens[comma].start]
        yield _Edit(source.tokens[i].start, source.tokens[source.partner[i + 1]].end, f"({value})")


def _index_off_by_one(source: Source, i: int) -> Iterator[_Edit]:
    if source.at(i) != "[" or i not in source.partner:
        return
    end = source.partner[i]
    if end == i + 1 or (end == i + 2 and source.kind(i + 1) == "number") or _declares_array(source, i):
        return
    begin_offset, end_offset = source.tokens[i].end, source.tokens[end].start
    yield _Edit(begin_offset, end_offset, f"({source.text[begin_offset:end_offset]}) + 1")


def _declares_array(source: Source, bracket: int) -> bool:
    before = bracket - 1
    while source.at(before) == "]":
        before = source.partner[before] - 1
    if source.at(before) == ")":  # Type (&name)[N]
        return source.at(source.partner[before] + 1) in ("&", "*")
    return source.kind(before) == "name" and (
        (source.kind(before - 1) == "name" and source.at(before - 1) != "return")
        or (source.at(before - 1) in (">", "*", "&") and not source.is_binary(before - 1))
    )


def _deletions(source: Source, i: int) -> Iterator[_Edit]:
    """The statement that begins with this token, unless it declares something."""
    if not _begins_statement(source, i) or source.at(i) in _NO_STATEMENT:
        return
    end = i
    while end < len(source.tokens) and source.at(end) not in (";", "{", "}"):
        end = source.partner[end] if source.at(end) in ("(", "[") else end
        end += 1
    statement = range(i, end)
    jumps = source.at(i) in ("break", "continue")
    follows = (
        source.at(i + 1) in ("(", ".", "[", "->", "::", "++", "--", *_ASSIGNMENTS) or source.at(i) == "*"
    )
    calls_or_assigns = follows and any(source.at(j) in ("(", "++", "--", *_ASSIGNMENTS) for j in statement)
    if source.at(end) == ";" and (jumps or calls_or_assigns):
        yield _Edit(source.tokens[i].start, source.tokens[end - 1].end, "")


def _begins_statement(source: Source, i: int) -> bool:
    before = source.at(i - 1)
    if not source.depths[i] or source.kind(i) not in ("name", "op"):
        return False
    if before == ")":
        return source.at(source.partner[i - 1] - 1) in ("if", "for", "while")
    if before == ";":
        return next(source.at(j) for j in source.back_from(i) if source.at(j) in ("(", "{")) == "{"
    return before in ("{", "}", "else")
