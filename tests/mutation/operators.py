"""The mutants of a kernel source: one small change each, of an operator, a constant, a condition, a call or a
statement.

Lines are read one by one, as the formatter leaves them: binary operators stand between spaces, and a template
bracket does not. Comments, attributes, compile-time assertions and preprocessor lines are left alone, the
bodies of macros are not.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

KERNELS = Path(__file__).resolve().parents[2] / "csrc" / "kernels"

_BINARY = {
    **{"+": ["-"], "-": ["+"], "*": ["/"], "/": ["*"], "%": ["/"]},
    **{"<": ["<=", ">="], "<=": ["<", ">"], ">": [">=", "<="], ">=": [">", "<"], "==": ["!="], "!=": ["=="]},
    **{"&&": ["||"], "||": ["&&"], "&": ["|"], "|": ["&"], "^": ["&"], "<<": [">>"], ">>": ["<<"]},
    **{"+=": ["-=", "="], "-=": ["+="], "*=": ["/=", "="], "/=": ["*="], "|=": ["=", "&="], "&=": ["|="]},
    "?": ["== false ?"],  # negates the comparison before it
}
_UNARY = {"++": "--", "--": "++", "!": "", "-": "", "~": ""}
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
_TOKEN = re.compile(
    r"""
    (?P<skip> "[^"]*" | \[\[.*?\]\] | /\*.*?\*/)
  | (?P<number> \.?[0-9](?:[eEpP][+-]|[0-9A-Za-z_.])*)
  | (?P<name> [A-Za-z_]\w*)
  | (?P<binary> (?<=\s)[-+*/%<>=!&|^?]+(?=\s))
  | (?P<unary> \+\+|--|[!~-](?=[\w(]))
    """,
    re.VERBOSE,
)
_LEFT_ALONE = re.compile(r"\s*(?:#|static_assert|FATTN_CHECK_)")
_STATEMENT = re.compile(
    r"(?:(?:\} )?else |(?:if|for|while) \(.*\) |.* \{ )?"
    r"((?:break|continue|[*(]*(\w+)(?:::|->|[.(\[]|\)\[|\+\+|--| (?:[-+*/|&]|<<|>>)?= ).*?)(?=;))"
)
_NO_STATEMENT = {"if", "for", "while", "return", "static_assert", "_Pragma", "alignas", "decltype"}
# The first argument of a clamp.
_CLAMPED = re.compile(r"clamp(\()((?:[^,()\[\]]|\[[^\]]*\]|\([^()]*\))*), ")
# What an array's size follows: a type and a name, or a reference to an array.
_DECLARED = re.compile(r"(?:(?:\w|\S[>*&])(?<!return) \w+|\([&*]\w+\))(?:\[[^\]]*\])*$")


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


def changed(file: str, old: str, new: str) -> Mutant:
    """A fault of our own: `new` in place of `old`, which the file has once."""
    (text,) = (path.read_text() for path in KERNELS.glob(f"*/{file}"))
    if text.count(old) != 1:  # not an AssertionError, which would count as caught
        raise LookupError(f"{file} has {text.count(old)} times {old!r}")
    begin = text.index(old)
    first, last = (text.count("\n", 0, place) for place in (begin, begin + len(old)))
    lines = text.replace(old, new + "\n" * (old.count("\n") - new.count("\n"))).split("\n")
    before = text.split("\n")[first : last + 1]
    after = tuple(lines[first : last + 1])
    return Mutant(Key(file, _code_of(*before), _code_of(*after)), first + 1, after)


def _code_of(*lines: str) -> str:
    code = (line.split("//")[0].rstrip("\\ ").strip() for line in lines)
    return " ".join(part for part in code if part)


def all_mutants() -> list[Mutant]:
    paths = sorted(KERNELS.glob("*/*"), key=lambda path: path.name)
    return [mutant for path in paths for mutant in mutants_of(path.name, path.read_text())]


def mutants_of(file: str, text: str) -> Iterator[Mutant]:
    times: Counter[tuple[str, str]] = Counter()
    before = ""
    for number, line in enumerate(text.split("\n"), start=1):
        code = line.split("//")[0].rstrip("\\ ")
        begins = not before or before[-1] in "{};" or before == "else"
        if not code or _LEFT_ALONE.match(code):
            continue
        before = code
        for start, end, new in sorted({*_edits(code, begins)}):
            becomes = line[:start] + new + line[end:]
            change = _code_of(line), _code_of(becomes)
            times[change] += 1
            yield Mutant(Key(file, *change, times[change]), number, (becomes,))


Edit = tuple[int, int, str]  # begin and end in a line, and what comes there


def _edits(code: str, begins: bool) -> Iterator[Edit]:
    """`begins`: whether a statement begins with the line."""
    for token in _TOKEN.finditer(code):
        yield from ((*token.span(), new) for new in _replacements(code, token))
    for opening in re.finditer(r"\b(?:if|while)(?: constexpr)? (\()", code):
        begin, end = opening.end(), _closing(code, opening.start(1))
        if end > 0 and not _FLAG.fullmatch(code[begin:end].removeprefix("!")):
            yield begin, end, f"!({code[begin:end]})"
    for clamp in _CLAMPED.finditer(code):
        if (end := _closing(code, clamp.start(1))) > 0:
            yield clamp.start(), end + 1, f"({clamp[2]})"
    for bracket in re.finditer(r"(?<=[\w)\]])\[", code):
        begin, end = bracket.end(), _closing(code, bracket.start())
        if end > 0 and not code[begin:end].isdigit() and not _DECLARED.search(code[: begin - 1]):
            yield begin, end, f"({code[begin:end]}) + 1"
    if begins and (statement := _STATEMENT.match(code.strip())) and statement[2] not in _NO_STATEMENT:
        begin = code.index(statement[1])
        yield begin, begin + len(statement[1]), ""


def _replacements(code: str, token: re.Match[str]) -> Iterator[str]:
    text, before = token.group(), code[: token.start()]
    if token.lastgroup == "number":
        declares_array = _DECLARED.search(before.rpartition("[")[0]) and before.count("[") > before.count("]")
        yield from () if declares_array else _other_numbers(text)
    elif token.lastgroup == "name":
        if text in _NAMES:
            yield _NAMES[text]
        is_declared = code[token.end() :].startswith(("[", " =")) or before.endswith(("bool ", "!"))
        if _FLAG.fullmatch(text) and code[0] == " " and not is_declared:
            yield f"!{text}"
    elif token.lastgroup == "binary":
        yield from _BINARY.get(text, [])
    elif token.lastgroup == "unary":
        yield _UNARY[text]


def _other_numbers(text: str) -> Iterator[str]:
    if match := _INTEGER.fullmatch(text):
        prefix, digits, suffix = match.group(1) or "", match.group(2), match.group(3)
        value = int(digits, 16 if prefix else 10)
        for other in (value - 1, value + 1):
            if other >= 0:
                yield f"{hex(other) if prefix else other}{suffix}"
    elif match := _FLOAT.fullmatch(text):
        yield f"{float(match.group(1)) + 1}{match.group(2)}"


def _closing(code: str, opening: int) -> int:
    """The bracket that closes this one, or -1 if it is on another line."""
    depth = 0
    for place in range(opening, len(code)):
        depth += (code[place] in "([") - (code[place] in ")]")
        if depth == 0:
            return place
    return -1
